"""GPT-2 in torch."""
