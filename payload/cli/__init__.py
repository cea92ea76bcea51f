"""One command for everything: which package carries out what, its help, and shell completion."""
