"""Google Cloud and Pulumi as the operator needs them: up, doctor, host keys, sweep, down.

`gcp/client.py` alone imports Google's client libraries, which take more than a second.
"""
