"""Prompts through a worker: kernels equal the reference, and chunks of any size give the same result."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from smc.distributions import DistributionSpec
from smc.executor.forward import PROMPT_ROW
from smc.executor.graph_runner import StageRunner
from smc.executor.messages import Draws, PromptBatch, PromptResult, TopLogprobsSpec
from smc.executor.ops import RoundOps
from smc.executor.prompt_rows import PromptForward, PromptRows
from smc.executor.triton_forward import TritonForward
from smc.executor.triton_ops import TritonOps
from smc.executor.worker import ModelWorker
from smc.memory.kv_cache import KVPool
from smc.memory.pages import DUMMY_PAGE
from smc.model.decoder import RopeTable
from smc.philox import Purpose
from smc.round.plan import Contexts
from smc.round.tensors import RowGroups, Rows, RowSpans, RowTables
from smc.stops import TokenBytes
from smc.types import Numerics
from tests.model.tiny import random_decoder, tiny_config
from tests.pairwise import one_of
from tests.scheduler.pairs import letter_tokenizer

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu compares them on the GPU itself")

OPS = {"reference": RoundOps(), "kernels": TritonOps()}
WIDTH, PAGES, VOCAB = 64, 200, 8

NO_BIASES = (np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32))


def worker(which: str, family: str = "llama", *, half: bool = False) -> ModelWorker:
    """`half`: in float16, in one order of sums."""
    model = random_decoder(tiny_config(family, vocab_size=VOCAB, head_dim=16))
    made = ModelWorker(
        "target",
        model.half() if half else model,
        width=WIDTH,
        pages=PAGES,
        vocab_size=VOCAB,
        token_bytes=TokenBytes.of(letter_tokenizer(VOCAB)),
        numerics=Numerics.INVARIANT if half else Numerics.FASTEST,
    )
    made.ops = OPS[which]
    return made


def batch(parts: list[tuple[int, int, int]], draws: bool, top_logprobs: TopLogprobsSpec | None = None) -> PromptBatch:
    """A batch of `parts` (sequence, positions already held, number of new tokens). Tokens and pages follow from the
    sequence number."""
    starts_R, counts_R = (np.array(column, dtype=np.int32) for column in zip(*[(held, new) for _, held, new in parts]))
    pages = [
        1 + 40 * sequence + np.random.default_rng(sequence).permutation(40)[: held + new]
        for sequence, held, new in parts
    ]
    tokens = [
        np.random.default_rng(9 + sequence).integers(0, VOCAB, 40)[held : held + new] for sequence, held, new in parts
    ]
    drawn = first_draws(len(parts)) if draws else None
    return PromptBatch(
        np.concatenate(pages).astype(np.int32), starts_R, counts_R, np.concatenate(tokens), drawn, top_logprobs
    )


def first_draws(rows: int) -> Draws:
    wide = np.zeros(rows, dtype=np.int64)
    streams_RF = np.arange(3)[None].repeat(rows, 0)
    return Draws(
        DistributionSpec.plain(rows),
        wide + 5,
        wide,
        streams_RF,
        Purpose.TARGET,
        np.full(rows, 3, np.int32),
        np.zeros(rows, np.int32),
        *NO_BIASES,
    )


def assert_close(one: PromptResult, other: PromptResult) -> None:
    assert np.array_equal(one.drawn_RF, other.drawn_RF)
    assert np.array_equal(one.top_YC, other.top_YC)
    for name in ("drawn_logp_RF", "logw_RF", "log_z_R", "top_logp_YC"):
        np.testing.assert_allclose(getattr(one, name), getattr(other, name), atol=1e-4)


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", *one_of("mixtral", "llama", "qwen3", "olmo2")])
def test_kernels_do_what_the_reference_does(family):
    """Ragged rows, with and without a past: chunks that return nothing, with `top_logprobs`, and at the end of
    prompts."""
    reference, kernels = worker("reference", family), worker("kernels", family)
    top_logprobs = TopLogprobsSpec(
        first_draws(2).distribution, 3, np.array([4, 30], np.int32), np.zeros(2, np.int32), (None, None)
    )
    for one in (
        batch([(0, 0, 17), (1, 0, 1), (2, 0, 40)], False),
        batch([(0, 17, 9), (1, 1, 30)], False, top_logprobs),
        batch([(0, 26, 1), (1, 31, 9)], True),
    ):
        assert_close(kernels.run_prompts(one).result(), reference.run_prompts(one).result())
    for found, expected in ((kernels.pool.keys, reference.pool.keys), (kernels.pool.values, reference.pool.values)):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        assert not found[:, DUMMY_PAGE].any()


@pytest.mark.parametrize("which", OPS)
def test_chunks_make_no_difference(which):
    whole, chunked = worker(which), worker(which)
    expected = whole.run_prompts(batch([(0, 0, 40)], True)).result()
    for held, new in ((0, 3), (3, 1), (4, 30)):
        chunked.run_prompts(batch([(0, held, new)], False))
    assert_close(chunked.run_prompts(batch([(0, 34, 6)], True)).result(), expected)
    torch.testing.assert_close(chunked.pool.keys, whole.pool.keys, atol=1e-5, rtol=1e-4)


PARTS = ([(0, 0, 17), (1, 0, 1), (2, 0, 40)], [(0, 17, 9), (1, 1, 30)], [(0, 26, 14), (1, 31, 9)])
"""Batches of parts, one after another."""


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])
def test_short_prompts_and_long_ones_have_the_same_bits(family, monkeypatch):
    """Prompts as rows of a round, and by the kernels of long prompts, in one order of sums."""
    as_rows, whole = worker("kernels", family, half=True), worker("kernels", family, half=True)
    calls = []
    run = PromptRows.__call__
    monkeypatch.setattr(PromptRows, "__call__", lambda *given: (calls.append(1), run(*given))[1])
    found = [as_rows.run_prompts(batch(parts, True)).result() for parts in PARTS]
    assert len(calls) == len(PARTS)
    monkeypatch.setattr(PromptRows, "takes", lambda *_: False)
    expected = [whole.run_prompts(batch(parts, True)).result() for parts in PARTS]
    assert len(calls) == len(PARTS)
    for one, other in zip(found, expected):
        for name in ("drawn_RF", "drawn_logp_RF", "logw_RF", "log_z_R"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert torch.equal(as_rows.pool.keys, whole.pool.keys) and torch.equal(as_rows.pool.values, whole.pool.values)


class Repeating(StageRunner):
    """Runs the first stage of a key again instead of later ones, as a recorded graph does."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.first: dict = {}

    def run(self, key, name, stage):
        return self.first.setdefault((key, name), stage)()


def test_a_recorded_pass_reads_what_is_new():
    """Prompts of other lengths, positions and pages are passes of one size: what differs is in memory that every one of
    them reads."""
    recorded, direct = worker("kernels"), worker("kernels")
    recorded.stages = Repeating()
    for parts in ([(2, 0, 33), (1, 0, 16)], [(0, 0, 20), (3, 0, 18)], [(0, 20, 3), (3, 18, 2), (2, 33, 7), (1, 16, 1)]):
        assert_close(recorded.run_prompts(batch(parts, True)).result(), direct.run_prompts(batch(parts, True)).result())
    assert [key.rows for key, _ in recorded.stages.first] == [4]
    assert torch.equal(recorded.pool.keys, direct.pool.keys) and torch.equal(recorded.pool.values, direct.pool.values)


def test_no_kernel_copies_prompts_before_they_are_stored():
    """A row of a prompt reads what the rows before it store in the same pass. The kernel for Hopper begins to copy
    prefixes before, and would be chosen for heads of 64 dimensions."""
    model = random_decoder(tiny_config(vocab_size=VOCAB, head_dim=64, num_heads=8, num_kv_heads=2)).bfloat16()
    reader = SimpleNamespace(
        model=model, pool=KVPool(model.config, PAGES, torch.bfloat16, "cpu"), rope=RopeTable(model.config, WIDTH),
        width=WIDTH, device=torch.device("cpu"), wanted_numerics=Numerics.FASTEST,
    )  # fmt: skip
    passes = PromptRows(reader, PromptForward(reader))
    for rows in passes.sizes:
        index = torch.arange(rows, dtype=torch.int32)
        shape = Rows(
            RowTables(torch.zeros(rows, WIDTH, dtype=torch.int32), index),
            RowSpans(index, index),
            RowGroups(index, index, index, index),
            queries=PROMPT_ROW,
            contexts=Contexts.SINGLE,
        )
        assert not passes.forward._attention_for(shape).tuning.specialized
        assert TritonForward(reader)._attention_for(shape).tuning.specialized
