"""A run that goes on: its live lines, how it is stopped, and how it ended."""
