"""GPT-2 as tensors."""
