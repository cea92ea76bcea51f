"""Google Cloud's part of the Pulumi program: its resources, labels and security rules."""
