"""Any other model, with transformers' own layers."""
