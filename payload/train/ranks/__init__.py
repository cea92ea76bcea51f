"""The rank of this process: its world and network interface, and commands on several ranks."""
