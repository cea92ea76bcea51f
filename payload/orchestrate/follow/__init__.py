"""Follows an active run: shows live output, stops the run, and prints the result."""
