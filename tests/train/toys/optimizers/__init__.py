"""A folder of optimizers, with the toy alone."""
