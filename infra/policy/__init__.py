"""The policy pack: infra.gcp.security's rules, limits of size and price, for `pulumi preview`."""
