"""Many requests through one local engine, a fixed number of them in flight. Knows nothing about what they are for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from smc.api.engine_config import EngineConfig
from smc.api.outputs import Output
from smc.api.request import Request
from smc.local_engine import ModelPair, local_engine
from smc.memory.kv_cache import pool_for
from smc.scheduler.admission import check_fits
from smc.scheduler.engine import Engine
from smc.scheduler.methods import decoding_of
from smc.types import ModelRole


def fitted_engine(pair: ModelPair, config: EngineConfig, requests: Sequence[Request], concurrency: int = 1) -> Engine:
    """An engine with just the slots and pages that `concurrency` of these requests need at once, to run without waiting
    for any.

    `max_slots` and `pages` of `config` are replaced. Raises ValueError if a request could not run however much there
    is."""
    needs = [decoding_of(r.params).ample_pages(config, r.params, len(r.prompt), r.negative_size) for r in requests]
    most = {role: max(need.get(role, 0) for need in needs) for role in ModelRole}
    slots = max(request.params.rows * request.params.slots_per_row for request in requests)
    context = min(config.max_context or pair.max_context, pair.max_context)
    for request in requests:
        check_fits(request, replace(config, max_slots=slots), most, context, pair.tokenizer.size)
    # A pool of nothing is not a pool: the side that a plain method leaves idle gets the smallest one.
    pages = max(2, pool_for(concurrency * max(most.values())))
    return local_engine(pair, replace(config, max_slots=concurrency * slots, pages=pages))


def run_in_flight(engine: Engine, requests: Iterable[Request], concurrency: int) -> Iterator[Output]:
    """Submit a request whenever fewer than `concurrency` are running; yield news as it comes, until all are
    answered."""
    waiting, running = iter(requests), 0
    while True:
        while running < concurrency and (request := next(waiting, None)) is not None:
            engine.submit(request)
            running += 1
        if not running:
            return
        for output in engine.step():
            running -= output.answer is not None
            yield output
