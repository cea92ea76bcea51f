"""Runs: their folders and copies, following them, and printing."""
