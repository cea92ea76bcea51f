"""An active run: its live output, its stop, and its result."""
