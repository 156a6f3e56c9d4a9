"""The order of an epoch's samples, and each rank's shard of its batches, as functions of seed and epoch."""
