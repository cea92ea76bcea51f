"""CONTRACT: a run's folder: its paths, records, metrics and lock, and who may write them."""
