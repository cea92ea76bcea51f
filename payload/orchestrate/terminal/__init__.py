"""Lines on the operator's terminal: progress, questions, the time that is left."""
