"""What can go wrong with a worker group."""


class WorkerGroupError(RuntimeError):
    """The worker group did not start, or one of its processes has ended. The message names the process and the
    cause."""

    def __init__(self, message: str, *, fault: bool = False, draft: bool = False) -> None:
        """`fault`: a process raised an error of its own; it was not killed and did not lose another process. `draft`:
        only the draft is lost, and the other processes can go on."""
        super().__init__(message)
        self.fault, self.draft = fault, draft


class RemoteTraceback(Exception):
    """A traceback of another process, as text: the cause of the error that names the process, so that it is shown with
    that, and the error's message stays one line."""
