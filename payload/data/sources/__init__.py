"""Sources of documents, a file for each kind."""
