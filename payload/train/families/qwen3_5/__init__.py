"""Qwen3.5: tensors of its dense text models."""
