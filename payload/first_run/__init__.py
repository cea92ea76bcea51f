"""Fine-tunes a small packaged chat model and shows its answers before and after: `make run`."""
