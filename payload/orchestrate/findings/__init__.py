"""Faults of nodes, and of a trial on them: pure functions over the nodes' answers."""
