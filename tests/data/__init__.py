"""Tests of payload.data."""
