"""A trained model as a file for use elsewhere, and its model card."""
