"""Runs on every rank: one model, trained by all ranks together."""
