"""GPT-2's sizes and costs."""
