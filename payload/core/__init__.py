"""Errors, exit codes, validation of untrusted values, and helpers that every program uses."""
