"""The ways out of a pipeline: the command line, exported models, Lightning, and job files of schedulers."""
