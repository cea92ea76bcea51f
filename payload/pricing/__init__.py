"""Hourly prices of Google Cloud resources, from its billing catalog or packaged tables."""
