"""Decides which rows training uses and how often: duplicates, the validation split and weights."""
