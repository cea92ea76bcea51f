"""The training program. It runs on every rank, and all ranks train one model together."""
