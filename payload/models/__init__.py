"""CONTRACT: a model's sizes and costs from its config.json, without torch.

Each family has a folder.
"""
