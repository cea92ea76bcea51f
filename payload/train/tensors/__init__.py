"""Files with tensors: reading, writing, and tensors that are read when they are needed."""
