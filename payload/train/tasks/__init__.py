"""What a run can train on: a file per task, each with its samples, its loss and its evaluation."""
