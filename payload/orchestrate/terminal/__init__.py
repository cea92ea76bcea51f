"""Writes to the operator's terminal: progress, questions, tables, remaining time."""
