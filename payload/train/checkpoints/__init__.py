"""Writing and reading of checkpoints, and the identity of an adapter's base model."""
