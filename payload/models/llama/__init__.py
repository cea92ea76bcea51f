"""The Llama family's numbers: Llama, SmolLM, Qwen, Mistral, Gemma 3."""
