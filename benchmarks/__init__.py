"""One command per claim; each prints a table on stderr and JSON on stdout."""
