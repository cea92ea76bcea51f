"""Hostile values and damaged bytes for every file and answer that Tileforge reads."""
