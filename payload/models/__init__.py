"""CONTRACT: a model's numbers, from its config.json alone and without torch. A file per family."""
