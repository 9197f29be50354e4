"""Ranks in processes of their own, each with its GPU: NCCL between the leaders and within a model, for several degrees
of tensor parallelism."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from benchmarks.processes import RankProcesses
from services.launch.config import WorkerGroupConfig, WorkerGroupError
from smc import demo
from smc.api.engine_config import EngineConfig
from smc.api.request import Request
from smc.api.sampling_params import Method, SamplingParams
from smc.demo.problems import generate
from smc.local_engine import ModelPair, local_engine
from smc.model.loader import random_model, save_model
from tests.scheduler.harness import answers

FORMS = {
    "look-ahead": EngineConfig(block=5, branches=4),
    "drafting again": EngineConfig(block=5, branches=4, redrafting="always"),
    "lockstep": EngineConfig(form="lockstep", block=8, micro_batches=2),
}
GROUPS = [
    ("demo", "nccl", 1, 1),
    ("demo", "grpc", 1, 1),
    ("demo", "nccl", 1, 2),
    ("demo", "nccl", 2, 2),
    ("demo", "grpc", 2, 2),
]
GROUPS += [("wide", "nccl", 1, 1), ("wide", "nccl", 1, 2), ("wide", "nccl", 1, 3), ("wide", "nccl", 3, 1)]
"""(models, link, ranks of draft, ranks of target)"""


@dataclass(frozen=True)
class Started:
    """A worker group, and its pair of models on the CPU."""

    group: RankProcesses
    on_cpu: ModelPair


@pytest.fixture(scope="module")
def directories(tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    """Directories of target and draft: the shipped pair, which at most two ranks can share because it has two key/value
    heads, and a random pair with eight."""
    directory, shipped = tmp_path_factory.mktemp("wide"), ModelPair.load(demo.TARGET, demo.DRAFT)
    sides = {"target": shipped.target, "draft": shipped.draft}
    for seed, (side, model) in enumerate(sides.items()):
        config = replace(model.config, num_heads=16, num_kv_heads=8, head_dim=32, intermediate_size=640)
        save_model(random_model(config, dtype=torch.float32, device="cpu", seed=seed), directory / side)
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(demo.TARGET / file, directory / side / file)
    return {"demo": (demo.TARGET, demo.DRAFT), "wide": (directory / "target", directory / "draft")}


@pytest.fixture(scope="module", params=GROUPS, ids=lambda group: "-".join(map(str, group)))
def started(request, directories) -> Iterator[Started]:
    """A worker group whose models stay loaded for all tests with the same link and degrees."""
    models, link, draft, target = request.param
    if torch.cuda.device_count() < draft + target:
        pytest.skip(f"needs {draft + target} GPUs")
    pair = dict(zip(("target", "draft"), directories[models]))
    config = WorkerGroupConfig(**pair, device="cuda", dtype="float32", link=link, draft_tp=draft, target_tp=target)
    with RankProcesses(config, {"draft": list(range(draft)), "target": list(range(draft, draft + target))}) as group:
        yield Started(group, ModelPair.load(*directories[models]))


@pytest.mark.parametrize("link", ["nccl", "grpc"])
def test_a_follower_that_dies_ends_the_worker_group(link):
    """The leader's GPU waits for the follower forever, in the middle of a sum; the engine must not wait for it."""
    if torch.cuda.device_count() < 3:
        pytest.skip("needs 3 GPUs")
    config = WorkerGroupConfig(device="cuda", dtype="float32", link=link, target_tp=2, link_timeout=20.0)
    asked, begin = requests(ModelPair.load(demo.TARGET, demo.DRAFT), method="smc", particles=4, ignore_eos=True), 0.0
    with (
        RankProcesses(config, {"draft": [0], "target": [1, 2]}) as group,
        pytest.raises(WorkerGroupError),
        group.engine(FORMS["look-ahead"]) as remote,
    ):
        for request in asked:
            remote.engine.submit(request)
        while not remote.engine.num_running:
            remote.engine.step()
        group._ranks["target", 1]._process.kill()
        begin = time.monotonic()
        while not remote.engine.idle:
            remote.engine.step()
    assert 0 < time.monotonic() - begin < 90


def requests(pair: ModelPair, **params) -> list[Request]:
    prompts = [pair.tokenizer.chat([{"role": "user", "content": p.question}]) for p in generate(7, 16, "test")]
    return [
        Request(str(i), tuple(prompt), SamplingParams(seed=i, max_tokens=150, **params))
        for i, prompt in enumerate(prompts)
    ]


def compare(started: Started, engine: EngineConfig, asked: list[Request]) -> None:
    """Compare answers with those of one process on the CPU. Sums over ranks round differently, so near-ties may fall
    the other way."""
    with started.group.engine(engine) as remote:
        found = {output.request_id: output.answer for output in remote.engine.run(asked) if output.answer}
    expected = answers(local_engine(started.on_cpu, engine), asked)
    same = sum(found[i].tokens == one.tokens and found[i].matched == one.matched for i, one in expected.items())
    print(f"{same} of {len(asked)} answers equal")
    assert same >= 14


@pytest.mark.parametrize("form", FORMS)
def test_float32_answers_are_the_cpu_s(started, form):
    method = Method.EXACT if FORMS[form].redrafting == "always" else Method.SMC
    compare(started, FORMS[form], requests(started.on_cpu, method=method, particles=8))


def test_stop_strings_and_plain_decoding(started):
    pair = started.on_cpu
    asked = [
        *requests(pair, method="smc", particles=4, stop=("####",))[:8],
        *requests(pair, method=Method.TARGET, stop=("=",))[8:],
    ]
    compare(started, FORMS["look-ahead"], asked)


def test_shared_ranks_choose_their_part_of_the_draft(directories):
    """They time it with the sums and graphs of rounds, before the models are loaded."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    pair, lockstep = dict(zip(("target", "draft"), directories["wide"])), EngineConfig(form="lockstep", block=8)
    config = WorkerGroupConfig(**pair, device="cuda", dtype="float32", placement="shared", target_tp=2, engine=lockstep)
    with RankProcesses(config, {"shared": [0, 1]}) as group:
        started = Started(group, ModelPair.load(*directories["wide"]))
        compare(started, lockstep, requests(started.on_cpu, method=Method.SMC, particles=8))
        assert group._store.store.get("1/draft/degree") in (b"1", b"2")
