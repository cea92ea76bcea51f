"""CONTRACT: folder formats that several packages read: checkpoints, data, tokenizers, models."""
