"""Programs that orchestrate sends to nodes over stdin: plain python3, standard library only."""
