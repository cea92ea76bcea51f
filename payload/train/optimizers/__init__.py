"""Optimizers, learning-rate schedule, and updates without torch.compile's machinery."""
