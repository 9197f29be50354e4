"""Two worker groups, each with both models on a GPU of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from smc import demo
from smc.local_engine import ModelPair, local_engine
from tests.gpu.test_service import assert_same
from tests.gpu.test_shared import ENGINE, START, SUMS, assert_streams_outlive, in_float32, serving
from tests.scheduler.harness import answers
from tests.service.asked import ASKED, engine_request
from tests.service.running import Running

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module", params=SUMS)
def running(request) -> Iterator[Running]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    with serving(request.param, worker_groups="auto") as made:
        yield made


@in_float32
def test_answers_are_those_of_a_cpu(running):
    pair = ModelPair.load(demo.TARGET, demo.DRAFT)
    asked = [engine_request(pair, i, question, dict(params)) for i, (question, params) in enumerate(ASKED)]
    found = answers(local_engine(pair, ENGINE), asked)
    assert len(running.service.balancer.groups) == torch.cuda.device_count()
    assert_same(running, [found[str(i)].text for i in range(len(ASKED))])


def test_streams_go_on_at_once_after_a_kill(running):
    """Those of the lost worker group continue in another one, and no other worker group restarts."""
    groups = running.service.balancer.groups
    # Found before the streams begin, which on a GPU end within a second.
    assert_streams_outlive(running, running.pids(1)["shared0"])
    assert groups[0].incarnation == 1
    running.until(lambda: groups[1].serving and groups[1].incarnation == 2, START, "the worker group did not come back")
