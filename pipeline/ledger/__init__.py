"""Measure what each stage contributes: variants, interleaved trials, statistics, and the resulting ledger."""
