"""This process as a rank: the world, its network interface, and commands of several ranks."""
