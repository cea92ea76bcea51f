"""Where documents come from: a file for each kind of source."""
