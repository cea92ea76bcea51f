"""Measures the loss of a checkpoint on a data folder."""
