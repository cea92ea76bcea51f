"""Multimodal checkpoints: their text model, and the parts that training copies unchanged."""
