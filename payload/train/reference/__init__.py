"""The command that stores a reference's log-probabilities beside preference pairs."""
