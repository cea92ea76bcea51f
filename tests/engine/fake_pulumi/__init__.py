"""A `pulumi` with state: it runs the cluster program, and creates and removes resources over HTTP.

It has the commands that Tileforge uses, on a file backend. Output, events, state and lock have a
real engine's format (recorded in tests/orchestrate/cloud/engine); the provider is
tests.engine.provider. Other features of the real engine are missing: secrets, aliases, imports,
policy packs.
"""
