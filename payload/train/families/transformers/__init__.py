"""Models of all other families, computed by transformers' own layers."""
