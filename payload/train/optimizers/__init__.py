"""Updates of the weights: the optimizers, their learning rate, and steps without kernels."""
