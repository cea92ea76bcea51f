"""Resolves the machines that a command uses, and the placement of ranks on them."""
