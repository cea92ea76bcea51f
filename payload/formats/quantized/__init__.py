"""Quantised checkpoints: recognising the format, and the weights that the stored tensors make."""
