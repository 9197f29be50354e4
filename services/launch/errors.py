"""What can go wrong with a gang."""


class GangError(RuntimeError):
    """The gang did not start, or one of its processes has died. The message says which and why."""
