"""A run's results in a bucket or a mounted folder: upload and restore."""
