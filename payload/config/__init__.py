"""CONTRACT: run.toml: its sections, conflicts between settings, and requirements of a model."""
