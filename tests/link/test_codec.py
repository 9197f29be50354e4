"""Messages cross the link unchanged, shapes and dtypes included."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from services.link import codec
from services.pb import particles_pb2 as pb
from smc.algorithm.expansion import PopulationKind
from smc.api.constraint import Constraint
from smc.distributions import DistributionSpec
from smc.executor.messages import DraftReport, Draws, Lineage, PromptBatch, PromptResult, RoundResult, TopLogprobsSpec
from smc.executor.plan import (
    ConstrainedRows,
    Contexts,
    Penalties,
    Program,
    RoundPlan,
    SequenceHandoff,
    UnconditionalRows,
)
from smc.philox import Purpose
from smc.stops import StopMachine

examples = settings(max_examples=20, deadline=None)


def equal(a: object, b: object) -> bool:
    if is_dataclass(a):
        return type(a) is type(b) and all(equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, np.ndarray):
        return (
            isinstance(b, np.ndarray)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
        )
    return a == b


def over_the_wire(message):
    """Serialise and parse a message, as a link does."""
    return type(message).FromString(message.SerializeToString())


@st.composite
def sizes(draw) -> tuple[np.random.Generator, int, int]:
    return np.random.default_rng(draw(st.integers(0, 2**32))), draw(st.integers(1, 9)), draw(st.integers(1, 5))


def law(rng: np.random.Generator, r: int) -> DistributionSpec:
    off = rng.random() < 0.3
    top_p = np.ones(r, np.float32) if off else rng.random(r, dtype=np.float32)
    temperature = np.float32(rng.integers(0, 3, r))
    one = DistributionSpec.of(
        temperature, rng.integers(0, 5, r), top_p, np.zeros(r, np.float32), np.ones(r, np.float32)
    )
    return one.canonical() if rng.random() < 0.5 else one


def draws(rng: np.random.Generator, r: int, d: int) -> Draws:
    seeds = rng.integers(-(2**63), 2**63 - 1, r, dtype=np.int64)
    streams, (count, kind) = rng.integers(0, 4096, (r, d)), rng.integers(0, 3, (2, r), dtype=np.int32)
    guidance = (rng.integers(0, 99, r, dtype=np.int32), rng.random(r, dtype=np.float32)) if rng.random() < 0.5 else ()
    biased = rng.integers(0, 2**31 - 1, (2, d - 1), dtype=np.int32)
    bias = rng.standard_normal(d - 1).astype(np.float32)
    one = Draws(
        law(rng, r), seeds, rng.integers(0, 1000, r), streams, Purpose.PROPOSAL, count, kind, biased, bias, *guidance
    )
    seen, repetition = rng.integers(0, 99, (2, d), dtype=np.int32), rng.random(d, dtype=np.float32)
    if rng.random() < 0.5:
        one = replace(one, seen_2Z=seen, repetition_Z=repetition)
    machines = (
        None,
        StopMachine.of([7], [], (), Constraint("choice", '["b"]', 2)),
        StopMachine.of([], [], (), Constraint("regex", "a+"), [(1, 2), (3,)]),
    )
    given = tuple(machines[i] for i in rng.integers(0, 3, r))
    return replace(one, machines=given, by_answer_R=rng.random(r) < 0.5) if rng.random() < 0.5 else one


def top_logprobs(rng: np.random.Generator, r: int) -> TopLogprobsSpec:
    asked, least = rng.integers(1, 4, 2 * r, dtype=np.int32), rng.integers(0, 99, r, dtype=np.int32)
    machines = [
        StopMachine.of([7], [b"ab"], (), Constraint("json_object")),
        StopMachine.of([], [], ((1, -0.7), (2**17, 100.0))),
        None,
    ]
    guidance = (rng.integers(0, 99, r, dtype=np.int32), rng.random(r, dtype=np.float32)) if rng.random() < 0.5 else ()
    one = TopLogprobsSpec(
        law(rng, r),
        int(rng.integers(1, 20)),
        asked,
        least,
        tuple(machines[i] for i in rng.integers(0, 3, r)),
        *guidance,
    )
    given_Y = rng.integers(0, 2**17, int(asked[:r].sum()))
    return replace(one, given_Y=given_Y) if rng.random() < 0.5 else one


@examples
@given(sizes(), st.sampled_from(("nothing", "draws", "top_logprobs")))
def test_prompts(drawn, asking):
    rng, r, d = drawn
    counts, starts, pages = rng.integers(1, 4, r, dtype=np.int32), *rng.integers(0, 2**31 - 1, (2, r), dtype=np.int32)
    asked = {
        "draws": {"draws": draws(rng, r, d)},
        "top_logprobs": {"top_logprobs": top_logprobs(rng, r)},
        "nothing": {},
    }[asking]
    batch = PromptBatch(pages, starts, counts, rng.integers(0, 2**17, int(counts.sum())), **asked)
    assert equal(codec.to_prompt_batch(over_the_wire(codec.prompt_command(batch))), batch)


@examples
@given(sizes(), st.booleans())
def test_prompt_result(drawn, drew):
    rng, r, d = drawn
    logp, log_z = (rng.standard_normal(shape).astype(np.float32) for shape in ((r, d), r))
    log_z[0] = np.nan
    top_logp = rng.standard_normal((7, d)).astype(np.float32)
    given = (
        (np.zeros(0, np.float32), np.zeros(0, np.int32)) if drew else (top_logp[:, 0], top_logp[:, 0].astype(np.int32))
    )
    nothing = (np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32), *given)
    result = (
        PromptResult(rng.integers(0, 99, (r, d), dtype=np.int32), logp, rng.standard_normal((r, d)), log_z, *nothing)
        if drew
        else PromptResult(
            *(np.zeros((r, 0), kind) for kind in (np.int32, np.float32, np.float64)),
            log_z,
            top_logp.astype(np.int32),
            top_logp,
            *given,
        )
    )
    assert equal(codec.to_prompt_result(over_the_wire(codec.prompt_outcome(result))), result)


@examples
@given(sizes(), st.booleans(), st.booleans())
def test_a_group_joins(drawn, shared, stopping):
    rng, n, q = drawn

    def ints(*shape: int) -> np.ndarray:
        return rng.integers(0, 2**31 - 1, shape, dtype=np.int32)

    join = SequenceHandoff(
        slots_N=ints(n),
        pages_XL=ints(1 if shared else n, 7),
        base=5,
        limit=99,
        least=7,
        end_N=ints(n),
        pending_NQ=ints(n, q),
        pending_N=ints(n),
        logq_NQ=rng.standard_normal((n, q)).astype(np.float32),
        ended_N=rng.random(n) < 0.5,
        alive_N=rng.random(n) < 0.5,
        text_N=ints(n),
        logw_N=rng.standard_normal(n),
        stops=3,
        machine=StopMachine.of([7, 2**17], [b"ab", "ü".encode()], ((1, -0.7), (2**17, 100.0)) if shared else ())
        if stopping
        else None,
        tokens_XL=ints(1 if shared else n, 7) if stopping else None,
    )
    found = codec.to_join(over_the_wire(codec.join_command(join)))
    assert equal(found, join)
    if stopping:
        assert np.array_equal(found.machine.next_XB, join.machine.next_XB)


@examples
@given(
    sizes(), st.booleans(), st.sampled_from(Program), st.sampled_from(Contexts), st.integers(1, 3), st.integers(0, 3)
)
def test_a_round(drawn, flag, program, contexts, f, b):
    rng, a, q = drawn

    def ints(*shape: int, dtype: type = np.int64) -> np.ndarray:
        return rng.integers(0, 2**31 - 1, shape).astype(dtype)

    unconditional = UnconditionalRows(
        scale_A=rng.random(a, dtype=np.float32),
        of_A=ints(a),
        **{name: ints(q) - 2**30 for name in ("index_U", "slot_U", "shift_U", "group_U")},
        **{name: ints(q, dtype=np.int32) for name in ("first_U", "size_U", "shared_U")},
        pages_UW=ints(q, b, dtype=np.int32),
    )
    constrained = ConstrainedRows(ints(a, dtype=np.int32), ints(a), rng.random(a) < 0.5, flag, not flag)
    of_group = {
        name: ints(a, dtype=np.int32)
        for name in ("first_G", "size_G", "count_G", "draws_G", "shared_G", "kind_G", "scheme_G")
    }
    plan = RoundPlan(
        program=program,
        contexts=contexts,
        columns=77,
        biased=256 if flag else 0,
        kinds=frozenset({PopulationKind.BEST, PopulationKind.DISTINCT})
        if flag
        else frozenset({PopulationKind.INDEPENDENT}),
        target_distribution=law(rng, a),
        draft_distribution=law(rng, a),
        slot_A=ints(a),
        group_A=ints(a),
        particle_A=ints(a),
        seed_A=rng.integers(-(2**63), 2**63 - 1, a, dtype=np.int64),
        round_A=ints(a),
        alpha_A=rng.random(a),
        exponent_A=rng.random(a, dtype=np.float32),
        **of_group,
        chain_C=ints(q if flag else 0),
        distribution_C=ints(q if flag else 0),
        threshold_G=rng.random(a),
        target_pages_AQ=ints(a, 0 if flag else q, dtype=np.int32),
        begin_pages_AP=ints(a, 1 + flag, dtype=np.int32),
        branch_pages_XB=ints(a * f, b, dtype=np.int32),
        target_unconditional=unconditional if rng.random() < 0.5 else None,
        penalties=Penalties(*rng.random((3, a), dtype=np.float32), ints(a)) if rng.random() < 0.5 else None,
        constraints=constrained if rng.random() < 0.5 else None,
    )
    found = codec.to_plan(over_the_wire(codec.round_command(plan)))
    assert equal(found, plan) and found.key == plan.key


@examples
@given(sizes(), st.integers(0, 4))
def test_round_result(drawn, w):
    rng, a, q = drawn
    logp = rng.standard_normal((a, q)).astype(np.float32)
    logp[0, 0] = np.nan
    result = RoundResult(
        ancestor_A=rng.integers(0, a, a, dtype=np.int32),
        alive_A=rng.random(a) < 0.5,
        cut_A=rng.integers(0, q, a, dtype=np.int32),
        grown_AQ=rng.integers(0, 2**17, (a, q), dtype=np.int32),
        count_A=rng.integers(0, q, a, dtype=np.int32),
        ended_A=rng.random(a) < 0.5,
        logw_A=rng.standard_normal(a),
        logq_AQ=logp + 1,
        logp_AQ=logp,
        first_logp_A=logp[:, 0].copy(),
        log_z_G=rng.standard_normal(a),
        ess_G=rng.random(a),
        **{
            name: rng.random(a) < 0.5 for name in ("resampled_G", "collapsed_G", "draft_nan_G", "target_nan_G", "hit_G")
        },
        lineage=Lineage(rng.integers(0, 99, (a, w), dtype=np.int32), *rng.integers(0, 9, (2, a), dtype=np.int32)),
    )
    assert equal(codec.to_result(over_the_wire(codec.round_outcome(result))), result)
    report = DraftReport(result.lineage, rng.random((3, a), dtype=np.float32))
    assert equal(codec.to_draft_report(over_the_wire(codec.round_outcome(report))), report)


def test_arrays_can_be_written_to():
    """With a read-only view of the message torch would warn, and in-place writes would fail."""
    pages = codec.to_prompt_batch(pb.PromptCommand(pages=b"\x01\x00\x00\x00")).pages_X
    pages[0] = 5
    assert pages.tolist() == [5]
