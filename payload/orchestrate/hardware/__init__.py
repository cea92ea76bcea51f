"""Compares the NVIDIA GPUs of a machine with the requirements of a run."""
