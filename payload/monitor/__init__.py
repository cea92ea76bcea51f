"""A run's metrics for Prometheus, and dashboards of them."""
