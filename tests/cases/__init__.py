"""Small inputs that were once refused, dropped or trained wrongly; `files` has them."""
