"""Local training: optimiser, training loop, training in cohorts, and privacy."""
