"""A run's metrics for Prometheus, and dashboards on them."""
