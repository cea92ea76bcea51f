"""Checks that every node is fit for a run: queries the nodes, tries the launcher, and reports
findings."""
