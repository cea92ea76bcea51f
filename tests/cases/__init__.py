"""Small inputs, in `files`, that were once refused, dropped or trained wrongly."""
