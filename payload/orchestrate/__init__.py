"""The operator's commands: plan, run, status, logs, list, stop."""
