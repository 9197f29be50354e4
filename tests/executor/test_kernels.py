"""Whole requests through the fused kernels, in Triton's interpreter where there is no GPU: the answers equal those of
the torch reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from smc.api.engine_config import EngineConfig
from smc.api.request import Answer
from smc.executor.graph_runner import StageRunner
from smc.executor.ops import RoundOps
from smc.executor.triton_forward import TritonForward
from smc.executor.triton_ops import TritonOps
from smc.executor.worker import ModelWorker
from smc.local_engine import ModelPair, local_engine
from smc.model.draft_vocab import DraftVocab
from smc.model.vocabularies import ForeignIds
from smc.scheduler.planner import DraftSize
from smc.scheduler.tree_policy import LatencyTreePolicy
from smc.stops import TokenBytes
from tests.executor.test_same_answers import assert_same
from tests.model.tiny import random_decoder, tiny_config
from tests.pairwise import one_of
from tests.scheduler.harness import Padding, PaddingOps, answers, assert_empty, request, running
from tests.scheduler.pairs import letter_tokenizer, peaked

pytestmark = [
    pytest.mark.usefixtures("few_pieces"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu compares them on the GPU itself"),
]


def pair(family: str) -> ModelPair:
    shape = {"vocab_size": 8, "hidden_size": 64, "head_dim": 16, "intermediate_size": 64, "max_context": 64}
    draft, target = (
        peaked(random_decoder(tiny_config(family, num_layers=layers, **shape), seed), 0.4)
        for layers, seed in ((1, 1), (2, 2))
    )
    return ModelPair(target, draft, letter_tokenizer(8), 64)


class InterpretedOps(TritonOps):
    """Triton kernels with padded rounds, without graph capture."""

    def stage_runner(self, device: torch.device) -> StageRunner:
        return Padding(device)


KERNELS = InterpretedOps()
LOCKSTEP, LOOKAHEAD = EngineConfig(form="lockstep", block=2), EngineConfig(block=2, branches=2)


ASKED = [
    request([1, 2, 3], "0", particles=3, seed=1, max_tokens=5, logprobs=True, population="independent"),
    request(
        [4], "1", particles=2, seed=2, max_tokens=5, ignore_eos=True, ess_threshold=1.0, stop=("ab",), min_tokens=3
    ),
    request([5, 6], "2", method="target", seed=3, max_tokens=4),
    request([1, 2, 3], "3", particles=3, seed=4, max_tokens=5, logprobs=True, min_tokens=3, logit_bias={2: 1.5, 7: -2}),
    request([7], "4", method="exact", particles=3, seed=5, max_tokens=5, logprobs=True),
    request(
        [3, 4],
        "5",
        method="exact",
        verification="rejection",
        particles=3,
        seed=6,
        max_tokens=5,
        logprobs=True,
        top_p=0.95,
    ),
]
"""One request of every kind."""


@pytest.mark.parametrize(
    ("family", "config", "which"),
    [
        pytest.param("llama", LOOKAHEAD, slice(1, 5), marks=pytest.mark.slow),
        pytest.param("llama", LOOKAHEAD, slice(2, 6, 3), marks=pytest.mark.slow),
        ("qwen2", LOOKAHEAD, slice(2)),
        ("qwen2", replace(LOCKSTEP, block=4, smc_block=2), slice(3)),
        pytest.param("llama", replace(LOOKAHEAD, block=4, smc_block=2), slice(1, 6), marks=pytest.mark.slow),
    ],
    ids=["ahead", "rejection ahead", "independent", "less than a block", "less than a block ahead"],
)
def test_answers_are_those_of_the_reference(family, config, which, monkeypatch):
    """Requests of several kinds in one round, and of one kind alone. Rejection runs with plain decoding only: in the
    interpreter a round of all kinds takes several times as long as its parts, and tests/kernels compares each stage of
    a mixed round with the reference. The tests below use one form each, as the kernels are the same in both, and
    tests/kernels covers both."""
    expected = answers(local_engine(pair(family), config), ASKED[which])
    monkeypatch.setattr("smc.local_engine.ops_for", lambda _device: KERNELS)
    found = answers(local_engine(pair(family), config), ASKED[which])
    for request_id, one in expected.items():
        assert_same(one, found[request_id])


@pytest.mark.slow
def test_guided_answers_are_those_of_the_reference(monkeypatch):
    """Two methods with guidance, each in rounds of its own kind, and a request without guidance. The target runs
    conditional and unconditional rows, padded."""
    law = {"max_tokens": 3, "logprobs": True, "guidance_scale": 2.0}
    asked = [
        replace(
            request([1, 2, 3], "0", method="exact", particles=2, seed=1, **law),
            negative_prompt=(4, 5, 6, 7, 1),
        ),
        replace(request([1, 2], "1", particles=2, seed=2, **law), negative_prompt=(3,)),
        request([1, 2, 3], "2", particles=1, seed=4, max_tokens=3, logprobs=True),
    ]
    expected = answers(local_engine(pair("llama"), LOOKAHEAD), asked)
    monkeypatch.setattr("smc.local_engine.ops_for", lambda _device: KERNELS)
    found = answers(local_engine(pair("llama"), LOOKAHEAD), asked)
    for request_id, one in expected.items():
        assert_same(one, found[request_id])


@pytest.mark.parametrize("config", [LOCKSTEP, LOOKAHEAD], ids=["lockstep", "lookahead"])
def test_rounds_that_draft_fewer_tokens_are_those_of_the_reference(config, monkeypatch):
    """Rounds draft two, three and all four tokens of a block of four, alternating; in lockstep also one."""
    config, drafted = replace(config, block=4), []
    levels = (2, 3, None) if config.lookahead else (1, 2, None)

    class InTurn(LatencyTreePolicy):
        def draft_size(self, *_given):
            drafted.append(levels[len(drafted) % 3])
            return DraftSize(config.branches, drafted[-1])

    monkeypatch.setattr(EngineConfig, "block_levels", (4, 3, 2))
    asked = [request([0, 1, 2], "0", method="exact", particles=2, seed=4, max_tokens=14, ignore_eos=True)]
    expected = answers(local_engine(pair("llama"), config, trees=InTurn(config)), asked)
    before, drafted[:] = tuple(drafted), []
    monkeypatch.setattr("smc.local_engine.ops_for", lambda _device: KERNELS)
    found = answers(local_engine(pair("llama"), config, trees=InTurn(config)), asked)
    assert_same(expected["0"], found["0"])
    assert set(before) == set(drafted) == set(levels)


@pytest.mark.parametrize(
    "beside", [{"method": "exact", "particles": 3}, pytest.param({"particles": 2}, marks=pytest.mark.slow)]
)
def test_rounds_that_draft_again_are_those_of_the_reference(beside, monkeypatch):
    """One, two and three tokens after a miss. The rows of another request, decoded exactly or by SMC, stay."""
    config, levels = EngineConfig(block=4, branches=2), []

    class InTurn(LatencyTreePolicy):
        def draft_size(self, *_given):
            levels.append(len(levels) % 3 + 1)
            return DraftSize(config.branches, None, 0, levels[-1])

    law = {"max_tokens": 8, "ignore_eos": True}
    asked = [
        request([0, 1, 2], "0", method="exact", particles=2, seed=4, **law),
        request([5, 1], "1", seed=7, **beside, **law),
    ]
    if beside.get("method") != "exact":
        config = replace(config, redrafting="always")
    monkeypatch.setattr("smc.local_engine.ops_for", lambda _device: PaddingOps())
    expected = answers(local_engine(pair("llama"), config, trees=InTurn(config)), asked)
    levels.clear()
    monkeypatch.setattr("smc.local_engine.ops_for", lambda _device: KERNELS)
    found = answers(local_engine(pair("llama"), config, trees=InTurn(config)), asked)
    for name, one in expected.items():
        assert_same(one, found[name])
        assert (one.statistics.rounds, one.statistics.misses) == (
            found[name].statistics.rounds,
            found[name].statistics.misses,
        )
    assert sum(one.statistics.misses for one in expected.values()) > 0


@pytest.mark.parametrize("form", one_of("lockstep", "lookahead"))
def test_rounds_that_run_common_tokens_once_are_those_of_the_reference(form, monkeypatch):
    """With few and with many nodes, after short and after long prompts."""
    config, nodes = replace(LOCKSTEP if form == "lockstep" else LOOKAHEAD, block=3), []

    class InTurn(LatencyTreePolicy):
        def draft_size(self, trees, batch_size, *_given):
            tokens = batch_size * config.scored(config.block)
            nodes.append((tokens // 2, tokens * 3 // 4, len(list(trees)))[len(nodes) % 3])
            return DraftSize(config.branches, None, nodes[-1])

    law = {"method": "exact", "max_tokens": 8, "ignore_eos": True, "logprobs": True}
    monkeypatch.setattr("smc.round.plan.SHORT", 20)
    for size in (3, 30):
        asked = [request([i % 3] * (size + i), str(i), particles=3 - i, seed=i, **law) for i in range(2)]
        with monkeypatch.context() as patch:
            expected = answers(local_engine(pair("llama"), config, trees=InTurn(config)), asked)
            patch.setattr("smc.local_engine.ops_for", lambda _device: KERNELS)
            found = answers(local_engine(pair("llama"), config, trees=InTurn(config)), asked)
        for name, one in expected.items():
            assert_same(one, found[name])
    assert len(nodes) > 12


def test_constrained_answers_are_those_of_the_reference(monkeypatch):
    """Two requests with a constraint, and one without."""
    law = {"max_tokens": 3, "logprobs": True, "constraint": {"regex": "(ab|ce*){2,}"}}
    asked = [
        request([1, 2, 3], "0", method="exact", particles=2, seed=1, **law),
        request([1, 2], "1", particles=2, seed=2, constraint_scope="answer", top_k=5, **law),
        request([1, 2, 3], "2", particles=1, seed=4, max_tokens=3, logprobs=True),
    ]
    expected = answers(local_engine(pair("llama"), LOCKSTEP), asked)
    monkeypatch.setattr("smc.local_engine.ops_for", lambda _device: KERNELS)
    found = answers(local_engine(pair("llama"), LOCKSTEP), asked)
    for request_id, one in expected.items():
        assert_same(one, found[request_id])


@pytest.mark.slow
def test_penalised_answers_are_those_of_the_reference(monkeypatch):
    """Requests with penalties, one of them guided, and one request without."""
    law = {"max_tokens": 5, "ignore_eos": True, "logprobs": True, "presence_penalty": 1.0, "repetition_penalty": 1.4}
    asked = [
        request([1, 2, 3], "0", method="exact", particles=2, seed=1, **law),
        replace(request([1, 2], "1", particles=2, seed=2, guidance_scale=2.0, **law), negative_prompt=(3,)),
        request([1, 2, 3], "2", particles=1, seed=4, max_tokens=3, logprobs=True),
    ]
    expected = answers(local_engine(pair("llama"), LOCKSTEP), asked)
    monkeypatch.setattr("smc.local_engine.ops_for", lambda _device: KERNELS)
    found = answers(local_engine(pair("llama"), LOCKSTEP), asked)
    for request_id, one in expected.items():
        assert_same(one, found[request_id])


@pytest.mark.slow
def test_truncated_and_powered_laws_are_those_of_the_reference(monkeypatch):
    """With only 4 candidate tokens per row, so that some tokens are drawn from the rest of the distribution."""
    for module in ("smc.executor.sampling", "smc.kernels.candidate_tokens"):
        monkeypatch.setattr(f"{module}.CANDIDATES_PER_ROW", 4)
    laws = [{"top_k": 3, "alpha": 1.5}, {"alpha": 0.5, "top_p": 0.7, "min_p": 0.2, "temperature": 0.8}]
    asked = [
        request([1, 2, 3], str(i), particles=2, seed=i, max_tokens=3, logprobs=True, **law)
        for i, law in enumerate(laws)
    ]
    expected = answers(local_engine(pair("llama"), LOCKSTEP), asked)
    monkeypatch.setattr("smc.local_engine.ops_for", lambda _device: KERNELS)
    found = answers(local_engine(pair("llama"), LOCKSTEP), asked)
    for request_id, one in expected.items():
        assert_same(one, found[request_id])


def test_a_draft_of_few_tokens_proposes_as_by_the_reference(monkeypatch):
    made = pair("llama")
    made = replace(made, draft_head=DraftVocab(np.array([0, 1, 4, 5, 7]), 8, 0.2).head(made.draft))
    law = {"particles": 2, "max_tokens": 3, "ignore_eos": True, "logprobs": True}
    asked = [request([1, 2, 3], seed=1, **law)]
    expected = answers(local_engine(made, LOOKAHEAD), asked)
    monkeypatch.setattr("smc.local_engine.ops_for", lambda _device: KERNELS)
    found = answers(local_engine(made, LOOKAHEAD), asked)
    for request_id, one in expected.items():
        assert_same(one, found[request_id])


def test_a_draft_with_foreign_ids_is_that_of_the_reference(monkeypatch):
    """Alone, and as the draft of an exact round."""
    made = pair("llama")
    ForeignIds(8, (2, 6)).fit(made.draft)
    made = replace(made, draft_head=DraftVocab.without((2, 6), 8).head(made.draft))
    law = {"max_tokens": 6, "ignore_eos": True, "temperature": 1.5}
    asked = [
        request([1, 2, 6], "draft", seed=3, method="draft", **law),
        request([1, 2, 6], "exact", seed=3, method="exact", particles=2, **law),
    ]
    expected = answers(local_engine(made, LOCKSTEP), asked)
    monkeypatch.setattr("smc.local_engine.ops_for", lambda _device: KERNELS)
    found = answers(local_engine(made, LOCKSTEP), asked)
    for request_id, one in expected.items():
        assert_same(one, found[request_id])
    assert not {2, 6} & {*found["draft"].tokens}


def test_populations_that_change_their_size_are_those_of_the_reference(monkeypatch):
    """Some slots have no particle, for one round or for good."""

    def resized() -> Answer:
        engine, sizes = local_engine(pair("llama"), LOCKSTEP), [4, 2]
        engine.submit(
            request([1, 2, 3], particles=4, min_particles=2, seed=1, max_tokens=8, ignore_eos=True, ess_threshold=0.3)
        )
        while not engine.idle:
            outputs = engine.step()
            for group in running(engine):
                if sizes and group.next_rows is None and group.count != sizes[-1]:
                    engine.resize("r", sizes.pop())
        assert_empty(engine)
        assert not sizes
        return outputs[-1].answer

    monkeypatch.setattr("smc.local_engine.ops_for", lambda _device: PaddingOps())
    expected = resized()
    monkeypatch.setattr("smc.local_engine.ops_for", lambda _device: KERNELS)
    assert_same(expected, resized())
    assert expected.statistics.particles_left == 4


class OneOfOne:
    """`smc.model.parallel.Reduce` of a model on a single rank. Its one buffer is overwritten with NaN when the next
    part is requested."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._buffer = torch.empty(10_000, device=device)
        self.sums = 0

    def room(self, tokens: int, features: int, dtype: torch.dtype) -> torch.Tensor:
        self._buffer.fill_(torch.nan)
        return self._buffer[: tokens * features].to(dtype).view(tokens, features)

    def __call__(self, part_TE: torch.Tensor) -> torch.Tensor:
        self.sums += 1
        return part_TE


@pytest.mark.slow
def test_reduce_buffers_are_used_before_reuse(monkeypatch):
    """With one rank, a sum equals its only part: the answers are the same if each sum is used before the next buffer is
    requested."""
    asked = [request([1, 2, 3], "0", particles=1, seed=1, max_tokens=2)]
    made = pair("llama")
    monkeypatch.setattr("smc.local_engine.ops_for", lambda _device: KERNELS)
    expected = answers(local_engine(made, LOOKAHEAD), asked)
    for model in (made.draft, made.target):
        for layer in model.layers:
            layer.reduce = reduce = OneOfOne()
    found = answers(local_engine(made, LOOKAHEAD), asked)
    assert_same(expected["0"], found["0"])
    assert reduce.sums > 2


def test_heads_that_the_kernels_cannot_do_are_refused_at_once():
    model = random_decoder(tiny_config("llama", head_dim=24), 1)
    with pytest.raises(ValueError, match="dimension 24; allowed"):
        TritonForward(
            ModelWorker("target", model, width=8, pages=8, vocab_size=8, token_bytes=TokenBytes.of(letter_tokenizer(8)))
        )


def test_every_operation_has_a_triton_form():
    operations = {name for name in dir(RoundOps) if not name.startswith("_")}
    assert operations and operations <= set(vars(TritonOps))
