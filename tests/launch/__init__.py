"""Tests of payload.launch."""
