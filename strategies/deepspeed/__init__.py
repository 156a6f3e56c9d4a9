"""DeepSpeed ZeRO as a strategy."""
