"""The peers' own steps, each a process that a benchmark starts.

No file here has a package's name: one is started as a script, in whose folder Python looks first.
"""
