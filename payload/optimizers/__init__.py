"""The optimizers for `optimizer.name`, one file each: costs, conflicts and construction."""
