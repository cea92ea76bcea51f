"""Job files for other engines: one module per engine."""
