"""Text to tokens: `python -m payload.data prepare` writes what `payload.train` reads."""
