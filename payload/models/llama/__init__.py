"""Sizes and costs of the Llama family, from Llama and Qwen to Phi, OLMo and Granite."""
