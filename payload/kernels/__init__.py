"""The training step's kernels: C++ that is built at first use, and autograd functions over it.

Without them the trainer runs on stock torch; docs/speed.md describes each kernel's purpose.
"""
