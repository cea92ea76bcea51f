"""Helpers for tests of several folders; never tests."""
