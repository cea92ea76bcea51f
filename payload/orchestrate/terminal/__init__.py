"""Output on the operator's terminal: progress, questions, tables, remaining time."""
