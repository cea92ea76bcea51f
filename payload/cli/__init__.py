"""The `tileforge` command: runs each package's commands, with help and shell completion."""
