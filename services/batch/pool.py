"""A pool of worker groups in Ray Data that answers lines.

Ray Data assigns each part of the input to an actor with its own worker group; the actor reads the part, decodes it and
writes the result. If an actor is lost, Ray Data starts it again and repeats the parts that were lost with it. An actor
has at most `PARTS_AT_A_TIME` parts."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from services.batch.output_file import written
from services.batch.parts import DonePart, InputPart, earlier_records, write_part
from services.batch.progress import Counts
from services.batch.runner import Replica, ReplicaSpec, ServiceLost
from services.batch.storage import Store
from services.launch import cluster

logger = logging.getLogger(__name__)
PARTS_AT_A_TIME = 2
"""Parts that a worker group decodes at a time: while the last lines of one part are decoded, the next part fills the
slots that become free."""
REPORT_SECONDS = 1.0
"""Time between two reports of a worker group."""


@dataclass(frozen=True)
class Pool:
    """A number of worker groups, with the input and the output. Picklable."""

    spec: ReplicaSpec
    groups: int
    source: Store
    sink: Store
    form: str
    """Format of the files that actors write."""

    def answer(self, parts: Sequence[InputPart], monitor: ray.actor.ActorHandle) -> Iterator[DonePart]:
        """Yield each part when it is done. A part whose worker group is lost for good is left out. Needs Ray to be
        connected; the worker groups end with the iterator."""
        from ray import data  # it and pandas take a second to import

        _set_up()
        compute = data.ActorPoolStrategy(
            size=self.groups,
            max_tasks_in_flight_per_actor=PARTS_AT_A_TIME,
            max_concurrent_calls_per_actor=PARTS_AT_A_TIME,
            enable_true_multi_threading=True,
        )
        # Local files may exist only on this host, so the actors run here then. Their ranks run where there is room.
        here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
        host = here if self.source.is_local or self.sink.is_local else None
        # Actors read and write, so that lines do not pass through the memory of other hosts.
        inputs = data.from_items([{"part": pickle.dumps(part)} for part in parts], override_num_blocks=len(parts))
        actor: Any = ReplicaActor  # Ray Data makes one, and calls it with rows.
        outputs = inputs.map(
            actor,
            fn_constructor_kwargs={"pool": self, "monitor": monitor},
            compute=compute,
            num_cpus=0,  # if models run on CPUs, their ranks hold all CPUs
            label_selector=host,
        )
        for row in outputs.iter_rows():
            yield pickle.loads(row["done"])


class ReplicaActor:
    """An actor of the pool, which answers parts with its own worker group."""

    def __init__(self, pool: Pool, monitor: ray.actor.ActorHandle) -> None:
        """Returns when the worker group has warmed up. Raises WorkerGroupError."""
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
        cluster.release_left()
        self._id, self._pool, self._monitor = ray.get_runtime_context().get_actor_id(), pool, monitor
        self._parts: dict[InputPart, Counts] = {}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        began = time.monotonic()
        monitor.start.remote(self._id)
        try:
            self._replica: Replica = Replica(pool.spec, pool.spec.group.serving_pair())
            asyncio.run_coroutine_threadsafe(self._replica.start(), self._loop).result()
        except Exception as error:
            ray.get(monitor.fail.remote(self._id, str(error)))
            raise
        monitor.ready.remote(self._id, time.monotonic() - began)
        self._reports = asyncio.run_coroutine_threadsafe(self._report(), self._loop)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Answer the part in a row. Called by several threads."""
        part: InputPart = pickle.loads(row["part"])
        try:
            done = self._done(part)
        except ServiceLost as error:
            # Ray starts this actor again, maybe on another host, and gives it these parts once more.
            ray.get(self._monitor.fail.remote(self._id, str(error)))
            os._exit(1)
        except Exception as error:
            logger.exception("a part has failed")
            done = DonePart(part, error=f"{part.name}: {error}")
        return {"done": pickle.dumps(done)}

    def _done(self, part: InputPart) -> DonePart:
        pool, lines, new, kept = self._pool, [], Counts(), Counts()

        def write(record: dict[str, Any], is_new: bool) -> None:
            nonlocal new, kept
            lines.append(written(record))
            if is_new:
                new += Counts.of(record)
            else:
                kept += Counts.of(record)
            self._parts[part] = new

        earlier = earlier_records(part, pool.sink, pool.form)
        inputs = part.parse(*part.read(pool.source), earlier)
        asyncio.run_coroutine_threadsafe(self._replica.answer(inputs, write), self._loop).result()
        done = write_part(DonePart(part, new, kept, b"".join(lines)), pool.sink, pool.form)
        self._monitor.report.remote(dict(self._parts))
        self._parts.pop(part, None)
        return done

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            self._monitor.report.remote(dict(self._parts))


def _set_up() -> None:
    """Configure Ray Data in this process."""
    from ray.data import DataContext

    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    # A part that is lost for good is done by another pass over the remaining parts; until then the others go on.
    context.max_errored_blocks = -1
    context.max_consecutive_actor_init_deaths = -1  # the caller counts them
    # A row is one part, and must not be split however large it is.
    context.target_max_block_size = None
    logging.getLogger("ray.data").setLevel(logging.ERROR)
