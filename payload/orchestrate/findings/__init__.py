"""Finds faults of nodes and of a trial in the nodes' responses. All functions are pure."""
