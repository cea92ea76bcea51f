"""Tokenizes text: `python -m payload.data prepare` writes the data folders that training reads."""
