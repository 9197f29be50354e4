"""What crosses the link arrives as it was sent, shapes and types included."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from services.link import codec
from services.pb import particles_pb2 as pb
from smc.engine.messages import ExtendBatch, ExtendResult, Keys, Rows, SampleBatch, SampleResult
from smc.kv.tables import RELEASE, PrefixMerge, RowMoves
from smc.laws import LawSpec
from smc.philox import Purpose

examples = settings(max_examples=40, deadline=None)


def equal(a: object, b: object) -> bool:
    if is_dataclass(a):
        return type(a) is type(b) and all(equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, np.ndarray):
        return (
            isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
        )
    return a == b


def over_the_wire(message):
    """Through bytes, as a link does it."""
    return type(message).FromString(message.SerializeToString())


@st.composite
def sizes(draw) -> tuple[np.random.Generator, int, int]:
    return np.random.default_rng(draw(st.integers(0, 2**32))), draw(st.integers(1, 9)), draw(st.integers(1, 5))


def rows(rng: np.random.Generator, r: int) -> Rows:
    counts = rng.integers(1, 4, r, dtype=np.int32)
    bounds = np.array([0, r], dtype=np.int64)
    numbers = rng.integers(0, 2**31 - 1, (2, r), dtype=np.int32)
    return Rows(numbers[0], numbers[1], counts, rng.integers(0, 2**17, int(counts.sum())), bounds, np.array([3]))


def law(rng: np.random.Generator, r: int) -> LawSpec:
    off = rng.random() < 0.3
    top_p = np.ones(r, np.float32) if off else rng.random(r, dtype=np.float32)
    temperature = np.float32(rng.integers(0, 3, r))
    return LawSpec.of(temperature, rng.integers(0, 5, r), top_p, np.zeros(r, np.float32), np.ones(r, np.float32))


def keys(rng: np.random.Generator, r: int, d: int) -> Keys:
    seeds = rng.integers(-(2**63), 2**63 - 1, r, dtype=np.int64)
    return Keys(seeds, rng.integers(0, 1000, r), rng.integers(0, 4096, (r, d)), Purpose.PROPOSAL)


@examples
@given(sizes(), st.booleans())
def test_sample(drawn, publish):
    rng, r, f = drawn
    batch = SampleBatch(rows(rng, r), rng.integers(0, 99, (r, f), dtype=np.int32), 3, law(rng, r), 0.05, keys(rng, r, f), publish)
    assert equal(codec.to_sample_batch(over_the_wire(codec.sample_command(batch))), batch)
    logq = rng.standard_normal((r, f, 3)).astype(np.float32)
    logq[0, 0, 0] = np.nan
    result = SampleResult(rng.integers(0, 2**17, (r, f, 3), dtype=np.int32), logq)
    assert equal(codec.to_sample_result(over_the_wire(codec.sample_outcome(result))), result)


@examples
@given(sizes(), st.booleans(), st.booleans(), st.booleans())
def test_extend(drawn, labelled, drawing, ahead):
    rng, r, f = drawn
    given_rows = rows(rng, r)
    tokens = len(given_rows.tokens_T)
    batch = ExtendBatch(
        given_rows,
        labels_T=rng.integers(-1, 99, tokens) if labelled else None,
        draws=keys(rng, r, f) if drawing else None,
        next_of="the draft" if ahead else None,
        next_index_R=rng.integers(-1, r, r) if ahead else None,
        law=law(rng, r) if labelled or drawing or ahead else None,
    )
    command = over_the_wire(codec.extend_command(batch, 7, (r, f)) if ahead else codec.extend_command(batch))
    assert equal(codec.to_extend_batch(command, batch.next_of), batch)
    assert (command.published, command.published_rows, command.published_branches) == ((7, r, f) if ahead else (0, 0, 0))


@examples
@given(sizes(), st.booleans(), st.booleans(), st.booleans())
def test_extend_result(drawn, scored, drew, ahead):
    rng, r, f = drawn

    def reals(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    result = ExtendResult(
        logp_T=reals(3 * r) if scored else None,
        next_logp_RF=reals(r, f) if ahead else None,
        drawn_RD=rng.integers(0, 99, (r, f), dtype=np.int32) if drew else None,
        drawn_logp_RD=reals(r, f) if drew else None,
        log_z_R=reals(r) if drew else None,
    )
    assert equal(codec.to_extend_result(over_the_wire(codec.extend_outcome(result))), result)


@examples
@given(sizes())
def test_moves_and_merges(drawn):
    rng, m, _ = drawn
    a, b, c, d = (rng.integers(RELEASE, 2**31 - 1, m, dtype=np.int32) for _ in range(4))
    assert equal(codec.to_moves(over_the_wire(codec.move_command(RowMoves(a, b, c)))), RowMoves(a, b, c))
    assert equal(codec.to_merge(over_the_wire(codec.merge_command(PrefixMerge(a, b, c, d)))), PrefixMerge(a, b, c, d))


def test_arrays_can_be_written_to():
    """A read-only view of the message would make torch warn, and fail where it writes in place."""
    moves = codec.to_moves(pb.MoveCommand(dst=b"\x01\x00\x00\x00", src=b"\x02\x00\x00\x00", start=b"\x00\x00\x00\x00"))
    moves.dst_M[0] = 5
    assert moves.dst_M.tolist() == [5]
