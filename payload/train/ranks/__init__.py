"""The rank of this process, the process group, and commands that run on several ranks."""
