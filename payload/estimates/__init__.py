"""Formulas for planning a run: step time, run time, strategies, micro-batch size, disk space."""
