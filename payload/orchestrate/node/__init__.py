"""Programs that orchestrate runs on nodes over stdin, with python3's standard library only."""
