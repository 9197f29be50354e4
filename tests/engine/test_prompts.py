"""Long prompts beside running requests: nobody waits for them."""

from __future__ import annotations

import pytest

from smc.engine.group import Phase
from smc.engine.local import local_engine
from smc.runtime.config import EngineConfig
from smc.runtime.sides import Parts
from tests.engine.harness import Padding, assert_empty, request
from tests.engine.lives import pair


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("form", ["lockstep", "lookahead"])
def test_running_requests_get_a_round_in_every_step(form, ahead, monkeypatch):
    """A prompt of 80 tokens, 4 a step: whoever runs is given a round in each of the twenty steps that it takes, in any method."""
    if ahead:
        monkeypatch.setattr("smc.engine.local.parts_for", lambda _device: Parts(stages=Padding))
    engine = local_engine(pair(), EngineConfig(form=form, block=2, prefill_chunk=4))
    for name, law in {"smc": {"particles": 3}, "target": {"method": "target"}, "draft": {"method": "draft"}}.items():
        engine.submit(request([1], name, seed=1, max_tokens=100, ignore_eos=True, **law))
    for _ in range(4):
        engine.step()
    groups = list(engine._groups.values())
    assert all(group.phase is Phase.RUNNING for group in groups)
    engine.submit(request([0, 1, 2, 2] * 20, "long", particles=2, seed=2, max_tokens=4, ignore_eos=True))
    long, steps = engine._groups["long"], 0
    while long.phase is not Phase.RUNNING:
        before = [group.launched for group in groups]
        engine.step()
        assert [group.launched for group in groups] == [rounds + 1 for rounds in before]
        steps += 1
    assert steps == 20
    while not engine.idle:
        engine.step()
    assert_empty(engine)


def test_a_short_prompt_behind_a_long_one_takes_its_turn():
    """Chunks are for the oldest first, and what a prompt leaves of one is for the next: no step runs more tokens than a chunk."""
    engine, most = local_engine(pair(), EngineConfig(block=2, prefill_chunk=10)), []
    for side, worker in engine.workers.items():
        run = worker.run_prompts
        worker.run_prompts = lambda batch, run=run, side=side: (most.append((side, len(batch.tokens_T))), run(batch))[1]
    for i, size in enumerate((25, 3, 9)):
        engine.submit(request([i % 3] * size, str(i), particles=2, seed=i, max_tokens=4, ignore_eos=True))
    began, counts = [], []
    while len(began) < 3:
        engine.step()
        counts.append([sum(count for side, count in most if side == name) for name in engine.workers])
        most.clear()
        began += [g.id for g in engine._groups.values() if g.phase is Phase.RUNNING and g.id not in began]
    assert began == ["0", "1", "2"]
    assert counts == [[10, 10], [10, 10], [10, 10], [7, 7]]
