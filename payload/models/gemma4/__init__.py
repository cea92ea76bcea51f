"""Gemma 4: sizes of its dense text models."""
