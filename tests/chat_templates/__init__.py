"""The chat templates that are in use, and what training must cover with each of them."""
