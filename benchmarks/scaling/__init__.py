"""Measures a step on several ranks beside one rank, and fits the model of a step's time."""
