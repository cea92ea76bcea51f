"""CONTRACT: a model's sizes and costs from its config.json, without torch. A folder per family."""
