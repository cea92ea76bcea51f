"""Tests of payload.cli."""
