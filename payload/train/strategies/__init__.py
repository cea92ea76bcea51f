"""How one model lives on many ranks: a file for each strategy, behind `base.Strategy`."""
