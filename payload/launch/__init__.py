"""Inventory and config in; ranks, files, environment and command lines out. No side effects."""
