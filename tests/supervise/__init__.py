"""Tests of payload.supervise."""
