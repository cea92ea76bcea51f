"""The prose lint of `make check`: wordings to avoid in docstrings, comments, messages and docs."""
