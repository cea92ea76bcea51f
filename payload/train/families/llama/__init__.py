"""The Llama family in torch: Llama, SmolLM, Qwen, Mistral, Gemma 3, Phi, OLMo, Granite."""
