"""The training program, which runs on every rank; all ranks train one model together."""
