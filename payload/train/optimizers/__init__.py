"""Optimizers, the learning-rate schedule, and updates without an import of torch.compile."""
