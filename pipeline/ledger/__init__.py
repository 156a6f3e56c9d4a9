"""What each stage brings: variants, interleaved trials, statistics, and the ledger drawn from the data."""
