"""The hourly prices of Google's machines, from its catalog or the packaged tables."""
