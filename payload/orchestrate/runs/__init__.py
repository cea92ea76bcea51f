"""The runs of this machine, the plan of a new one, and copies of runs that are elsewhere."""
