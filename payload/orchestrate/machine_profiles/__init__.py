"""Profiles of machines for planning a run: programs, speed and memory."""
