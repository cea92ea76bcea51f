"""Sizes and costs of models of all remaining families, which transformers builds."""
