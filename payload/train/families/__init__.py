"""Model families implemented in torch, one folder each."""
