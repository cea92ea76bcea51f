"""Exports weights: GGUF for llama.cpp, and the Hugging Face layout in bf16."""
