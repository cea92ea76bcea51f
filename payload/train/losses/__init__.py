"""The losses that tasks minimise, one file each; the model's head is separate."""
