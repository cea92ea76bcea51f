"""The losses that tasks minimise, a file each, apart from how a model's head computes them."""
