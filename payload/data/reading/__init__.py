"""Readers of a prepared data folder: blocks of tokens, checked ranges, pairs and labels."""
