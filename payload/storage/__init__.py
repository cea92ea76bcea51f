"""A run's results in an object store or a mounted folder: upload, and the way back."""
