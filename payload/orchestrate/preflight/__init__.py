"""Checks that every node is fit for a run: probes, a trial of the launcher, findings."""
