"""Tests of how a model lives on many ranks."""
