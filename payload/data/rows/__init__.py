"""Rows of conversations, pairs and labels: reading and checking them."""
