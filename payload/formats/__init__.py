"""CONTRACT: folders that several packages read: checkpoints, data, tokenizers, Hugging Face's."""
