"""Models as torch modules: the interface to training and generation, and shared parts."""
