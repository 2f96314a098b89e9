"""What a run writes and shows: metrics, tables, plots, the page, trackers, seeds."""
