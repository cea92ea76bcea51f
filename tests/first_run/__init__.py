"""Tests of `make run`."""
