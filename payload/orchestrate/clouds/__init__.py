"""Google Cloud and Pulumi for the commands up, doctor, sweep and down, and for host keys.

Only `gcp/client.py` imports Google's client libraries, because that takes more than a second.
"""
