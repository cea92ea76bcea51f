"""Models of any other family, with transformers' own layers."""
