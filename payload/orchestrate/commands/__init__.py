"""The operator's commands: plan, run, status, attach, dashboard, and the Google Cloud commands."""
