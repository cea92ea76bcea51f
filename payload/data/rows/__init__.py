"""Reads and checks rows of conversations, pairs and labels."""
