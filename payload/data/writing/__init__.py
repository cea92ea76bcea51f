"""Writes documents to a data folder: planning, encoding, progress and meta.json."""
