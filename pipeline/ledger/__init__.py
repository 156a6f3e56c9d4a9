"""Measure what each stage brings: variants, interleaved trials, statistics, and the resulting ledger."""
