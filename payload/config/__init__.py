"""CONTRACT: run.toml: its sections, what conflicts, and what a setting asks of a model."""
