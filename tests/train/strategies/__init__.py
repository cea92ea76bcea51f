"""Tests of models distributed over ranks."""
