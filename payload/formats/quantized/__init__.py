"""Quantised checkpoints: finds the format, and the stored tensors of each weight."""
