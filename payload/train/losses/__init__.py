"""The losses that tasks minimise, one file each. A loss does not include the output head."""
