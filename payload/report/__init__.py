"""A run folder as one HTML page, or several as a table in the terminal."""
