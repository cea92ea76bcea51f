"""Models of all remaining families, computed by transformers' own layers."""
