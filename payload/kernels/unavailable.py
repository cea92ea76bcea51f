"""Why this machine has no kernels."""


class KernelsUnavailableError(Exception):
    """The kernels cannot be built or used here; the reason fits after "no kernels: ".

    Never the user's problem: the reference path is taken instead, and said.
    """
