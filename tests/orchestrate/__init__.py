"""Tests of payload.orchestrate."""
