"""CONTRACT: checks values from other processes against the limits that dataclass fields declare."""
