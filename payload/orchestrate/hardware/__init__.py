"""NVIDIA's GPUs: facts about a machine, and what a run needs of them."""
