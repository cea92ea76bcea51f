"""Writes documents to a data folder: plan, encoding, journal and meta.json."""
