"""Model families as tensors: a folder each."""
