"""Tests of the numbers of models."""
