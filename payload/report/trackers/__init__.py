"""Trackers that a run's numbers are sent to: one module per tracker, found by name."""
