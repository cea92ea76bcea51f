"""Decides which rows are trained and how often: duplicates, the validation split and weights."""
