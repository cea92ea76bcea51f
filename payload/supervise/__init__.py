"""Keeps one run alive on its head node, and says how it ended."""
