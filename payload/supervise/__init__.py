"""Supervises one run on its head node and records how it ended."""
