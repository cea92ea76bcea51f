"""CONTRACT: a model's sizes and costs from its config.json, without torch. One folder per family."""
