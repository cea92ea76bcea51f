"""The optimizers of `optimizer.name`, a file each: numbers, conflicts and construction."""
