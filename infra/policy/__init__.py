"""The policy pack for `pulumi preview`: infra.gcp.security_rules, and limits of size and price."""
