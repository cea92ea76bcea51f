"""From documents to a data folder: the plan, the encoding, the journal and meta.json."""
