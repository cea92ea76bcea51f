"""Where a run lives: this machine, or a cluster over SSH."""
