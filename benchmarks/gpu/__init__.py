"""One visit to a machine with a GPU: stages that compare the trainer on it with the CPU."""
