"""The steps of other projects, each in a process that a benchmark starts.

No file here is named after a package: Python searches a script's folder first.
"""
