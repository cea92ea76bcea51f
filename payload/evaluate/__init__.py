"""The loss of a checkpoint on a data folder."""
