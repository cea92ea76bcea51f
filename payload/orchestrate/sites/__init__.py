"""Sites where runs execute: this machine, a cluster over SSH, a Slurm cluster."""
