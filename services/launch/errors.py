"""What can go wrong with a worker group."""


class WorkerGroupError(RuntimeError):
    """The worker group did not start, or one of its processes has ended. The message says which and why."""

    def __init__(self, message: str, *, fault: bool = False, draft: bool = False) -> None:
        """`fault`: a process has found something wrong with what it was asked to do; it was neither killed, nor did it
        lose another. `draft`: the others can go on without it."""
        super().__init__(message)
        self.fault, self.draft = fault, draft


class RemoteTraceback(Exception):
    """A traceback of another process, as text: the cause of the error that names the process, so that it is shown with
    that, and the error's message stays one line."""
