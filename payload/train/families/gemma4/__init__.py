"""Gemma 4: tensors of its dense text models."""
