"""What crosses the link arrives as it was sent, shapes and types included."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from services.link import codec
from services.pb import particles_pb2 as pb
from smc.engine.matcher import StopMatcher
from smc.engine.messages import Draws, PromptBatch, PromptResult
from smc.laws import LawSpec
from smc.philox import Purpose
from smc.resident.plan import RoundPlan, RoundResult, Start

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


def law(rng: np.random.Generator, r: int) -> LawSpec:
    off = rng.random() < 0.3
    top_p = np.ones(r, np.float32) if off else rng.random(r, dtype=np.float32)
    temperature = np.float32(rng.integers(0, 3, r))
    one = LawSpec.of(temperature, rng.integers(0, 5, r), top_p, np.zeros(r, np.float32), np.ones(r, np.float32))
    return one.at_any_temperature() if rng.random() < 0.5 else one


def draws(rng: np.random.Generator, r: int, d: int) -> Draws:
    seeds = rng.integers(-(2**63), 2**63 - 1, r, dtype=np.int64)
    return Draws(law(rng, r), seeds, rng.integers(0, 1000, r), rng.integers(0, 4096, (r, d)), Purpose.PROPOSAL)


@examples
@given(sizes(), st.booleans())
def test_prompts(drawn, drawing):
    rng, r, d = drawn
    counts, (rows, starts) = rng.integers(1, 4, r, dtype=np.int32), rng.integers(0, 2**31 - 1, (2, r), dtype=np.int32)
    batch = PromptBatch(rows, starts, counts, rng.integers(0, 2**17, int(counts.sum())), draws(rng, r, d) if drawing else None)
    assert equal(codec.to_prompt_batch(over_the_wire(codec.prompt_command(batch))), batch)


@examples
@given(sizes(), st.booleans())
def test_prompt_result(drawn, drew):
    rng, r, d = drawn
    logp, log_z = (rng.standard_normal(shape).astype(np.float32) for shape in ((r, d), r))
    log_z[0] = np.nan
    result = PromptResult(rng.integers(0, 99, (r, d), dtype=np.int32), logp, log_z) if drew else PromptResult()
    assert equal(codec.to_prompt_result(over_the_wire(codec.prompt_outcome(result))), result)


@examples
@given(sizes(), st.booleans(), st.booleans())
def test_a_group_joins_and_leaves(drawn, alone, matching):
    rng, n, x = drawn
    ints = [rng.integers(0, 2**31 - 1, n, dtype=np.int32) for _ in range(2)]
    matcher = StopMatcher(rng.integers(0, 9, 50, dtype=np.int16), rng.integers(0, 9, (x + 2, 9), dtype=np.int16)) if matching else None
    start = Start(ints[0], 3, 17, 99, ints[1], rng.random(n) < 0.5, rng.standard_normal(n), [2, 2**17], matcher, rng.integers(0, 9, n))
    command = over_the_wire(codec.join_command(start, alone))
    assert equal(codec.to_start(command), start) and command.alone == alone
    command = over_the_wire(codec.leave_command(ints[0], alone))
    assert equal(codec.to_slots(command), ints[0]) and command.alone == alone
    assert equal(codec.to_rows(over_the_wire(codec.release_command(ints[1]))), ints[1])


@examples
@given(sizes(), st.booleans(), st.sampled_from([None, "systematic", "ssp"]))
def test_a_round(drawn, flag, scheme):
    rng, g, m = drawn
    a = g * m

    def ints(size: int, dtype: type = np.int64) -> np.ndarray:
        return rng.integers(0, 2**31 - 1, size).astype(dtype)

    plan = RoundPlan(
        schemes=(scheme,) * g,
        short=flag,
        matching=not flag,
        target_law=law(rng, a),
        draft_law=law(rng, a),
        slots_A=ints(a),
        particle_A=ints(a),
        seed_A=rng.integers(-(2**63), 2**63 - 1, a, dtype=np.int64),
        round_A=ints(a),
        position_A=ints(a),
        room_A=ints(a),
        alpha_A=rng.random(a),
        size_G=ints(g),
        shared_G=ints(g, np.int32),
        threshold_G=rng.random(g),
        uniforms_GU=rng.random((g, 1 if flag else 4 * m)),
        branch_uniforms_GM=rng.random((g, m)),
    )
    command = over_the_wire(codec.round_command(plan, flag))
    assert equal(codec.to_plan(command), plan) and command.alone == flag


@examples
@given(sizes())
def test_round_result(drawn):
    rng, g, m = drawn
    a, q = g * m, 5
    logp = rng.standard_normal((a, q)).astype(np.float32)
    logp[0, 0] = np.nan
    result = RoundResult(
        ancestor_A=rng.integers(0, a, a, dtype=np.int32),
        grown_AQ=rng.integers(0, 2**17, (a, q - 1), dtype=np.int32),
        count_A=rng.integers(0, q, a, dtype=np.int32),
        ended_A=rng.random(a) < 0.5,
        logw_A=rng.standard_normal(a),
        logp_AQ=logp,
        first_logp_A=logp[:, 0].copy(),
        log_z_G=rng.standard_normal(g),
        ess_G=rng.random(g),
        **{name: rng.random(g) < 0.5 for name in ("resampled_G", "collapsed_G", "draft_nan_G", "target_nan_G")},
    )
    assert equal(codec.to_result(over_the_wire(codec.round_outcome(result))), result)


def test_arrays_can_be_written_to():
    """A read-only view of the message would make torch warn, and fail where it writes in place."""
    rows = codec.to_rows(pb.ReleaseCommand(rows=b"\x01\x00\x00\x00"))
    rows[0] = 5
    assert rows.tolist() == [5]
