"""Sources of documents, one module for each kind."""
