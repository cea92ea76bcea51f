"""The kernels of the training step: C++ that is built at first use, and autograd functions.

Without the kernels, the trainer runs on stock torch. docs/explanations/kernels.md describes the
purpose of each kernel.
"""
