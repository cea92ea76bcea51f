"""The formulas before a run: time of a step and of the run, strategies, micro-batch, disk space."""
