"""The Llama family as tensors: Llama, SmolLM, Qwen, Mistral, Gemma 3."""
