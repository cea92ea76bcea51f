"""CONTRACT: a cluster's settings, files and identity, for `infra` and the operator's commands."""
