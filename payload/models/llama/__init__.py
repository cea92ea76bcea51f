"""Sizes and costs of the Llama family: Llama, SmolLM, Qwen, Mistral, Gemma 3, OLMo, Granite."""
