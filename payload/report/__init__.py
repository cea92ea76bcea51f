"""Reports on runs: an HTML page, a table in the terminal, and rows for trackers."""
