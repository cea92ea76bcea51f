"""Losses of short runs, compared between two commits or with stored values."""
