"""Qwen3.5: sizes of its dense text models."""
