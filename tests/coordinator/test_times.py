"""The times of an answer are those of the models, although the coordinator does not wait for them: prefill ends when
the prompt has run at every model of the method."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import replace

import pytest

from services.coordinator import process
from services.coordinator.process import RemoteEngine
from services.launch.config import WorkerGroupConfig
from services.launch.worker_group import coordinator_spec, rank_spec
from services.link.connect import Rendezvous
from services.link.store import StoreServer
from services.workers.process import run_rank
from smc.api.engine_config import EngineConfig
from smc.api.request import Request
from smc.api.sampling_params import SamplingParams
from smc.calibration.warm_up import warm_up_plans
from smc.executor.worker import ModelWorker
from smc.model.parallel import Shard
from smc.types import ModelRole
from tests.coordinator.harness import HOST, SECRET

SLOW = 1.0
"""Seconds that the slow model takes for a prompt."""


WARMED = 3
"""Dummy rounds of the warm-up."""


@pytest.fixture(scope="module", params=["lookahead", pytest.param("lockstep", marks=pytest.mark.slow)])
def started(request):
    """An engine over a link to both models, which run in threads, and what it has told its supervisor."""
    engine = EngineConfig(block=3, **({"branches": 2} if request.param == "lookahead" else {"form": "lockstep"}))
    config = WorkerGroupConfig(engine=engine, start_timeout=60.0, link_timeout=60.0)
    pair = config.serving_pair()
    store = StoreServer(HOST, SECRET, 60.0)
    rendezvous = Rendezvous(HOST, store.port, 1, SECRET, "nccl", config.start_timeout)

    def run(role: ModelRole) -> None:
        with suppress(Exception):
            run_rank(rank_spec(config, pair, rendezvous, role, Shard()), HOST)

    ranks = [threading.Thread(target=run, args=(role,), name=role, daemon=True) for role in ModelRole]
    for rank in ranks:
        rank.start()
    spec = replace(coordinator_spec(config, pair, rendezvous, warm_up=False), warm_up=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(process, "warm_up_plans", lambda *given, **named: warm_up_plans(*given, **named)[-WARMED:])
        patched.setattr(process, "rare_requests", lambda *given: [])
        remote = RemoteEngine(spec)
    yield remote.engine, store.store.get(rendezvous.warmed)
    remote.stop()
    for rank in ranks:
        rank.join(20)


@pytest.fixture
def engine(started):
    return started[0]


def test_the_warm_up_tells_its_progress(started):
    assert started[1] == b"100"


@pytest.mark.parametrize("role", ModelRole)
@pytest.mark.parametrize("method", ["smc", "exact", "target", "draft"])
@pytest.mark.parametrize("tokens", [1, 12])
def test_prefill_lasts_until_the_prompt_has_run(engine, monkeypatch, method, role, tokens):
    run_prompts = ModelWorker.run_prompts

    def slow(worker: ModelWorker, batch):
        if threading.current_thread().name == role:
            time.sleep(SLOW)
        return run_prompts(worker, batch)

    monkeypatch.setattr(ModelWorker, "run_prompts", slow)
    params = SamplingParams(method=method, max_tokens=tokens, seed=1)
    # A prompt of its own, so that nothing of it is cached.
    prompt = tuple(1 + (ord(one) % 200) for one in f"{method} {role} {tokens} {time.monotonic_ns()}"[:24])
    begin = time.monotonic()
    (answer,) = [out.answer for out in engine.run([Request("r", prompt, params)]) if out.answer]
    seconds = time.monotonic() - begin
    times = answer.times
    assert times.queue + times.prefill + times.decode == pytest.approx(answer.seconds) and answer.seconds <= seconds
    takes_part = method in ("smc", "exact") or method == role.value
    if not takes_part:
        assert answer.seconds < SLOW
    elif tokens > 1:
        assert times.prefill >= SLOW, times
    else:
        # One token ends the answer as soon as the model that draws it has run the prompt.
        assert times.decode < SLOW and (times.prefill >= SLOW or answer.seconds < SLOW), times
