"""A `pulumi` that holds state: the cluster program runs, and its resources come and go over HTTP.

The commands that Tileforge uses, on a backend in a folder. What is printed, the events, the state
and the lock have the form of a real engine's (tests/orchestrate/cloud/engine has recorded ones);
the provider is tests.engine.provider. What the real engine does beyond these commands is missing:
secrets, aliases, imports, policy packs.
"""
