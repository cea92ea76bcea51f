"""The numbers of any other model that transformers builds."""
