"""Page pools of a measurement fit its load: no round waits for pages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.load import Load, Waves, endless_requests, repeated, sized_config, sized_for
from smc.api.engine_config import EngineConfig
from smc.api.sampling_params import SamplingParams
from smc.local_engine import local_engine
from tests.scheduler.harness import request
from tests.scheduler.pairs import tiny_pair
from tests.scheduler.random_histories import pair


@pytest.mark.parametrize(
    ("form", "law"),
    [
        ("lockstep", {"method": "exact", "particles": 8}),
        ("lookahead", {"method": "exact", "particles": 4}),
        ("lookahead", {"method": "smc", "particles": 8}),
        ("lockstep", {"method": "target"}),
    ],
    ids=str,
)
def test_no_round_waits_for_pages(form, law):
    load = Load(2, [[0, 1, 2] * 10, [1, 2], [2] * 20, [1, 0]], 24)
    config = EngineConfig(form=form, block=5, drafting="always")
    asked = load.make_requests(SamplingParams(ignore_eos=True, **law), 24)
    engine = local_engine(pair(), sized_config(config, asked, load.requests))
    for method in {"target", law["method"]}:
        engine.rounds_of(SamplingParams(method=method).decoding).pipelined = True
    loop, allocate, left_out = Waves(engine, repeated(asked), load.requests), engine.preemption.allocate, []

    def counted(wanting):
        given = allocate(wanting)
        left_out.append(len(wanting) - len(given))
        return given

    engine.preemption.allocate = counted
    while loop.wave < 3:
        loop.step()
    assert sum(left_out) == 0 and len(left_out) > 10


def test_sized_for_admits_all_requests():
    rejection = {"method": "exact", "verification": "rejection"}
    params = SamplingParams(seed=1, particles=20, max_tokens=12, ignore_eos=True, guidance_scale=2.0, **rejection)
    sized = sized_for(EngineConfig(block=3, branches=2, max_slots=1, max_chains=1, pages=40_000), params, 3)
    assert sized.max_slots == 120 and sized.chains(4) == 60
    engine = local_engine(tiny_pair(), sized)
    for i in range(3):
        engine.submit(replace(request(request_id=str(i)), params=params))
    engine.step()
    assert engine.num_running == 3
    assert sized_for(sized, SamplingParams(method="smc", particles=4), 2).max_chains == 0


def test_no_request_is_another_s_copy():
    """With fewer prompts than requests, prompts repeat; answers do not, which would be accepted alike."""
    asked = endless_requests([[1, 2], [3]], EngineConfig(block=3), 4, {"method": "exact", "particles": 2}, 5)
    assert [one.prompt for one in asked] == [(1, 2), (3,)] * 2 and len({one.params.seed for one in asked}) == 4
