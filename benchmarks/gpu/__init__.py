"""A visit to a machine with a GPU: stages that compare the trainer with its runs on the CPU."""
