"""Chat templates, rendered by a process of their own."""
