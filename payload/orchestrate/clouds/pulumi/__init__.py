"""Pulumi: its engine, and building, changing and destroying a cluster with it."""
