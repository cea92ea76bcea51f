"""The error for missing kernels."""


class KernelsUnavailableError(Exception):
    """The kernels cannot be built or used on this machine; the text gives the reason.

    Not an error for the user: the run logs it and uses torch.
    """
