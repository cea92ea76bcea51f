"""What Google's machines cost an hour, from its catalog or the packaged tables."""
