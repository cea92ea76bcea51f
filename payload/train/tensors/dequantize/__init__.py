"""Dequantisation in torch: some rows of a weight at a time, from the tensors that store it."""
