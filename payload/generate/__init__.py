"""Generates text from a checkpoint."""
