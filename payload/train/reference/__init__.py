"""The command that stores a reference model's log-probabilities with preference pairs."""
