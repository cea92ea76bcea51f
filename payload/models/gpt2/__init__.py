"""GPT-2's numbers."""
