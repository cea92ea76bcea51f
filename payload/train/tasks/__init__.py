"""Training tasks, a file each, with its samples and its evaluation."""
