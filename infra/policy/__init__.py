"""The policy pack: infra.security's rules, and limits of size and price, for `pulumi preview`."""
