"""The policy pack for `pulumi preview`: security rules, and limits on nodes and price."""
