"""Quantised checkpoints: recognises the format, and which stored tensors form each weight."""
