"""The formulas before a run: time of a step, micro-batch, disk space."""
