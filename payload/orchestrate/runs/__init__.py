"""The runs of this machine, the plan of a new run, and copies of remote runs."""
