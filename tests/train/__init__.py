"""Tests of payload.train."""
