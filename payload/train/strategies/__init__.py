"""The strategies that distribute a model over ranks: one file each, behind `base.Strategy`."""
