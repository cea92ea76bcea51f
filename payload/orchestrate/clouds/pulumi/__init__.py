"""Pulumi: runs its engine, and builds, changes and destroys a cluster."""
