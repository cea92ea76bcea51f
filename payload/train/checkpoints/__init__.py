"""A checkpoint's tensors and files, when they are written, and the base of an adapter."""
