"""The service gives the answers of the in-process engine, whatever else is in flight. The same over gRPC, in lockstep
and with two ranks for each model: tests/deploy/test_ray.py."""

from __future__ import annotations

import pytest

from services.client import Message
from tests.service.asked import ASKED, LOOKAHEAD, all_are_the_engines_own, engines_own

pytestmark = pytest.mark.xdist_group("ray")


def test_clients_of_all_kinds_at_once(group, demo_pair):
    with group.client() as client:
        all_are_the_engines_own(client, group.service.gateway.http_port, engines_own(demo_pair, LOOKAHEAD))
    group.until_empty()


def test_draft_and_target_work_at_the_same_time(group):
    """In look-ahead both models work on a round at once: in most rounds the times of draft and target add up to more
    than the round takes."""
    rounds, supervisor = [], group.supervisor
    before, supervisor._on_step = supervisor._on_step, lambda step: rounds.append(step.times) if step.times else None
    try:
        with group.client() as client:
            client.generate(
                [Message("user", ASKED[0][0])], method="smc", particles=8, seed=1, max_tokens=75, ignore_eos=True
            )
    finally:
        supervisor._on_step = before
    overlapped = [r for r in rounds if r.draft + r.target > r.whole - r.coordinator]
    assert len(overlapped) > len(rounds) / 2
