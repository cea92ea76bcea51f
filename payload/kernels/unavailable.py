"""The error for missing kernels."""


class KernelsUnavailableError(Exception):
    """The kernels cannot be built or used on this machine; the text gives the reason.

    This error does not stop a run. The run logs the reason and uses torch.
    """
