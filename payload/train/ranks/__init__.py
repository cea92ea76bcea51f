"""This process as a rank: the world, its network interface, and commands on several ranks."""
