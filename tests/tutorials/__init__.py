"""Tests that run the commands of README and of docs/tutorials, at a reduced size."""
