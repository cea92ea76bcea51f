"""Sizes and costs of models of all other families, which transformers builds."""
