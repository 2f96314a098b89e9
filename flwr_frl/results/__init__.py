"""The output of runs: metrics, tables, plots, the page, trackers, several seeds."""
