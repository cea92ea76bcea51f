"""Tensor files: writing them, and reading single tensors on demand."""
