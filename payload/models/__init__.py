"""CONTRACT: a model's numbers, from its config.json alone, without torch. A folder per family."""
