"""Google Cloud: its client, resources, checks, host keys and firewall."""
