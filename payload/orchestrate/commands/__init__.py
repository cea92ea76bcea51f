"""The operator's commands: plan, run, status, attach, dashboard, and those for Google Cloud."""
