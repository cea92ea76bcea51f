"""Where a model's weights come from: the hub, a folder, a run, an adapter and its base."""
