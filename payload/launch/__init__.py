"""Computes ranks, files, environment and command lines of a run, without side effects."""
