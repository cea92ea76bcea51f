"""Exports the metrics of a run to Prometheus, and shows them on dashboards."""
