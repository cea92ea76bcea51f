"""The prose lint of `make check`: wordings that docstrings, comments, messages and docs avoid."""
