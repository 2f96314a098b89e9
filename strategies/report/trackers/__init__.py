"""Where a run is tracked besides its results folder."""
