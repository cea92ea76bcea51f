"""What the operator asks for: plan, run, status, attach, and the cloud's commands."""
