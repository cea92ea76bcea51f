"""A data folder as training reads it: blocks of tokens, their ranges, pairs and labels."""
