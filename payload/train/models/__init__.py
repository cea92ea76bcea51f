"""Models as torch modules: what training and generation ask of them, and what families share."""
