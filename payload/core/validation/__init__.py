"""CONTRACT: values of another process, each held to what its dataclass field declares."""
