"""Metrics, dashboard queries and alerts of real runs in a real Prometheus."""
