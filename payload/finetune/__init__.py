"""Fine-tunes a model on a file: chooses and prints every setting, then runs."""
