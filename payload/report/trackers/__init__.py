"""Trackers to which the metrics of a run are sent; each tracker is a module with its name."""
