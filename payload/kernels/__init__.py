"""The training step's own kernels: C++ built at first use, and autograd functions over it.

The trainer runs without them, on stock torch alone; docs/speed.md says what each is for.
"""
