"""What training reads of a data folder: blocks of tokens, their ranges, pairs and labels."""
