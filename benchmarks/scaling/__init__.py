"""Measures a step on several ranks against one rank, and fits the model of a step's time."""
