"""CONTRACT: machines, their cores and GPUs, and the ranks on them."""
