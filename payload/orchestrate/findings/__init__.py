"""Faults of nodes, and of a trial of them, in words: pure functions over what they answered."""
