"""NVIDIA GPUs: facts about a machine, and the requirements of a run."""
