"""The first process of a container: mounts what its arguments list, then runs the command. Like tini, it forwards
signals and reaps orphans.

init.py MOUNTS COMMAND..: MOUNTS is JSON, `{"mounts": [[source, target, read-only], ..], "readOnlyRoot": true}`. Uses
only Python's standard library. It ends with the command's exit code; then the kernel ends all other processes of the
namespace."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading

MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC = 1, 32, 4096, 16384
libc = ctypes.CDLL(None, use_errno=True)


def mount(settings: dict) -> None:
    """Bind all mounts. Sources are opened first, because a volume over /tmp would hide sources that are there."""
    opened = [(os.open(source, os.O_PATH), target, read_only) for source, target, read_only in settings["mounts"]]
    for source, target, read_only in opened:
        bind(f"/proc/self/fd/{source}", target, MS_BIND | MS_REC)
        if read_only:
            bind("none", target, MS_REMOUNT | MS_BIND | MS_RDONLY)
        os.close(source)
    if settings["readOnlyRoot"]:
        bind("none", "/", MS_REMOUNT | MS_BIND | MS_RDONLY)


def bind(source: str, target: str, flags: int) -> None:
    if libc.mount(source.encode(), target.encode(), None, flags, None):
        raise OSError(ctypes.get_errno(), f"cannot mount {source} on {target}: {os.strerror(ctypes.get_errno())}")


def end_with_the_scenario() -> None:
    """End when standard input closes. It is a pipe to which nothing is written, and it closes when the main process of
    the scenario ends in any way."""
    sys.stdin.read()
    os._exit(1)


def main() -> int:
    mount(json.loads(sys.argv[1]))
    os.chdir("/tmp")
    threading.Thread(target=end_with_the_scenario, daemon=True).start()
    child = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: child.send_signal(number))
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child.pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
