"""Errors and exit codes, checks of untrusted values, and what every program prints or starts."""
