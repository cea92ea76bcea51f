"""Files by which other engines carry out a run: one file an engine."""
