"""A `pulumi` with state, which runs the cluster program and manages its resources over HTTP.

It has the commands that Tileforge uses, on a backend in a folder. Output, events, state and lock
have a real engine's format (tests/orchestrate/cloud/engine has recordings); the provider is
tests.engine.provider. Other features of the real engine are missing: secrets, aliases, imports,
policy packs.
"""
