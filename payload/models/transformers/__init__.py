"""Sizes and costs of any other model that transformers builds."""
