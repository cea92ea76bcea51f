"""CONTRACT: the run folder, with its paths, records, metrics and lock."""
