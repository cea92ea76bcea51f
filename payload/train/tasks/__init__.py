"""Training tasks, one file each, with their samples and evaluation."""
