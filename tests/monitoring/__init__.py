"""Prometheus itself, on real runs: the metrics, the dashboards' queries and the alerts."""
