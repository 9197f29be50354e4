"""The error of a failing worker names that worker and the cause, whichever model it runs and whichever worker the
coordinator waits for. A target outlives its draft."""

from __future__ import annotations

import threading

import pytest

from services.coordinator.process import RemoteEngine
from services.launch.config import WorkerGroupConfig
from services.launch.worker_group import coordinator_spec, rank_spec
from services.link.base import LinkError
from services.link.connect import Rendezvous
from services.link.store import StoreServer
from services.workers.process import run_rank
from services.workers.rank import ResponseSender
from smc.api.engine_config import EngineConfig
from smc.api.request import Request
from smc.api.sampling_params import SamplingParams
from smc.executor.messages import ModelLost
from smc.executor.round_executor import DraftRunner, TargetRunner
from smc.model.parallel import Shard
from tests.coordinator.harness import HOST, SECRET, SIDES


@pytest.mark.parametrize(
    ("link", "side", "what"),
    [
        ("nccl", "draft", "draft"),
        ("grpc", "draft", "remap"),
        pytest.param("nccl", "target", "round", marks=pytest.mark.slow),
        pytest.param("grpc", "draft", "draft", marks=pytest.mark.slow),
        pytest.param("nccl", "draft", "remap", marks=pytest.mark.slow),
        pytest.param("grpc", "target", "round", marks=pytest.mark.slow),
    ],
)
def test_the_error_is_that_of_the_worker_that_failed(monkeypatch, caplog, link, side, what):
    fails(monkeypatch, caplog, link, side, what)


@pytest.mark.parametrize("sends", [True, False])
def test_the_error_is_known_when_its_message_is_lost(monkeypatch, caplog, sends):
    """The coordinator names the failed worker and its error even if the worker's own message about it does not arrive,
    or cannot be sent."""

    def lost(*_: object) -> None:
        if not sends:
            raise LinkError("the link broke while sending")

    monkeypatch.setattr(ResponseSender, "fail", lost)
    fails(monkeypatch, caplog, "nccl", "target", "round")


def fails(monkeypatch, caplog, link: str, side: str, what: str) -> None:
    """Run a pair of workers, one of which raises ValueError in its first call of `what`. The coordinator must name that
    worker and the error. If it is the draft, the target must go on."""
    config = WorkerGroupConfig(
        engine=EngineConfig(block=3, branches=2, drafting="always"), start_timeout=30.0, link_timeout=20.0, link=link
    )
    pair = config.serving_pair()
    store = StoreServer(HOST, SECRET, 30.0)
    rendezvous = Rendezvous(HOST, store.port, 1, SECRET, link, config.start_timeout)
    errors = {}

    def run(name: str) -> None:
        try:
            run_rank(rank_spec(config, pair, rendezvous, name, Shard()), HOST)
        except Exception as error:
            errors[name] = error

    ranks = [threading.Thread(target=run, args=(name,), daemon=True) for name in SIDES]
    for rank in ranks:
        rank.start()
    remote = RemoteEngine(coordinator_spec(config, pair, rendezvous))

    def broken(self, *_: object) -> None:
        raise ValueError("out of luck")

    monkeypatch.setattr({"draft": DraftRunner, "target": TargetRunner}[side], what, broken)
    with pytest.raises((LinkError, ModelLost)) as failed:
        list(
            remote.engine.run(
                [
                    Request(
                        "one",
                        (1, 2, 3),
                        SamplingParams(method="smc", particles=2, max_tokens=20, seed=1, ignore_eos=True),
                    )
                ]
            )
        )
    assert str(remote.cause(failed.value)) == f"the {side} model's worker failed: ValueError: out of luck"
    if side == "draft":
        remote.workers["target"].ping()
        remote.stop()
    for rank in ranks:
        rank.join(15)
    assert not any(rank.is_alive() for rank in ranks)
    assert errors.keys() == ({"draft"} if side == "draft" else {"draft", "target"})
    # What the coordinator tells is one line; the rank's log says where it comes from.
    assert ", in broken" in caplog.text
