"""Weights in other programs' formats: GGUF for llama.cpp, and the Hugging Face layout in bf16."""
