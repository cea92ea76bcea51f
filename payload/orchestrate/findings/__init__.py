"""Finds faults of nodes and of a trial, with pure functions over the answers of the nodes."""
