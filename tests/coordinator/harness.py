"""A worker group without Ray: the coordinator in this thread, every rank in a thread of its own, and real links between
them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from services.coordinator.process import Coordinator, CoordinatorSpec
from services.launch.config import WorkerGroupConfig
from services.launch.worker_group import coordinator_spec, rank_spec
from services.link.connect import Rendezvous
from services.link.store import StoreServer
from services.workers.process import run_rank
from services.workers.spec import RankSpec
from smc.api.engine_config import EngineConfig
from smc.model.parallel import Shard
from smc.types import ModelRole

HOST, SECRET = "127.0.0.1", "secret"
SIDES = tuple(ModelRole)


@contextmanager
def coordinator(
    engine: EngineConfig, *, watched: bool = True, **settings: Any
) -> Iterator[tuple[Coordinator, CoordinatorSpec]]:
    """Start a coordinator for the demo pair, warmed up. `settings` are those of the worker group. At the end, every
    rank must have received the command to stop. `watched`: check that the engine does not fail before that."""
    config = WorkerGroupConfig(
        engine=engine, **{"start_timeout": 30.0, "link_timeout": 20.0, "heartbeat": 0.2, **settings}
    )
    pair = config.serving_pair()
    store = StoreServer(HOST, SECRET, 30.0)
    rendezvous = Rendezvous(HOST, store.port, 1, SECRET, config.link, config.start_timeout)
    places = [(one.name, Shard(rank, one.size)) for one in config.rank_groups for rank in range(one.size)]
    specs = [rank_spec(config, pair, rendezvous, name, place) for name, place in places]
    ranks = [threading.Thread(target=_run, args=(spec,), daemon=True) for spec in specs]
    for rank in ranks:
        rank.start()
    spec = coordinator_spec(config, pair, rendezvous)
    made = Coordinator(spec, HOST)
    failures: list[Exception] = []

    def wait() -> None:
        try:
            made.wait()
        except Exception as error:
            failures.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    if watched:
        waiting.start()
    try:
        yield made, spec
    finally:
        if not failures:
            made.stop()
        if watched:
            waiting.join(10)
        assert not failures, failures
        for rank in ranks:
            rank.join(10)
            assert not rank.is_alive(), "a rank has not heard that it is to stop"


def _run(spec: RankSpec) -> None:
    """Run one rank. Its errors are ignored here, because the coordinator reports them."""
    with suppress(Exception):
        run_rank(spec, HOST)
