"""What worker groups report while they answer parts of the input. Imports nothing heavy: it is an actor of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from services.batch.progress import Counts

if TYPE_CHECKING:
    from services.batch.parts import InputPart


@dataclass(frozen=True)
class Snapshot:
    """What worker groups have reported."""

    starting: int
    ready: int
    started: tuple[float, ...]
    """Seconds that starts took, in the order in which they ended."""
    failures: tuple[str, ...]
    """Starts that have failed since the last one that did not."""
    coming: Counts
    """Of parts that are not written yet."""


class Monitor:
    """What is known of worker groups, wherever they run. They report to it at any time."""

    def __init__(self) -> None:
        self._states: dict[str, bool] = {}
        """By worker group, whether it is ready; without those that failed."""
        self._started: list[float] = []
        self._failures: list[str] = []
        self._parts: dict[InputPart, Counts] = {}
        self._written: set[InputPart] = set()

    def start(self, name: str) -> None:
        self._states[name] = False

    def ready(self, name: str, seconds: float) -> None:
        self._states[name] = True
        self._started.append(seconds)
        self._failures.clear()

    def fail(self, name: str, why: str) -> None:
        self._states.pop(name, None)
        self._failures.append(why)

    def report(self, parts: dict[InputPart, Counts]) -> None:
        self._parts |= {part: counts for part, counts in parts.items() if part not in self._written}

    def snapshot(self, written: Sequence[InputPart]) -> Snapshot:
        """`written`: parts that count no longer."""
        self._written.update(written)
        for part in written:
            self._parts.pop(part, None)
        ready = sum(self._states.values())
        coming = sum(self._parts.values(), start=Counts())
        return Snapshot(len(self._states) - ready, ready, tuple(self._started), tuple(self._failures), coming)


def start_monitor() -> Any:
    """A handle of an actor, on this host. Needs Ray to be connected."""
    import ray

    here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
    return ray.remote(Monitor).options(num_cpus=0, label_selector=here).remote()
