"""Sources of a model's weights: the hub, a folder, a run, an adapter and its base."""
