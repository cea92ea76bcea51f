"""The operator's commands: plan, run, status, attach, dashboard, and the cloud commands."""
