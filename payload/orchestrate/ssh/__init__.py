"""SSH connections to nodes: logins, file transfers, keys, and programs that run on nodes."""
