"""Where a run's numbers go besides its folder: a file a tracker, found by name."""
