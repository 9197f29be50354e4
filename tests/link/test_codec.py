"""Messages cross the link unchanged, shapes and dtypes included; what is not of the declared types is refused."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass, replace
from enum import StrEnum
from typing import Any, get_type_hints

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.link.base import LinkError
from services.link.codec import Codec
from services.link.messages import (
    REQUESTS,
    RESPONSES,
    MemoryUse,
    ModelResult,
    ModelResults,
    Ping,
    Pong,
    Reconnect,
    WorkRequest,
    WorkResponse,
)
from smc.algorithm.selection import NextParticles, SelectionStatistics
from smc.api.constraint import Constraint
from smc.distributions import DistributionSpec
from smc.executor.messages import Draws, Guidance, PromptBatch, PromptResult, TopLogprobsSpec
from smc.philox import Purpose
from smc.round.plan import (
    ConstrainedRows,
    Contexts,
    Penalties,
    RoundArrays,
    RoundKind,
    RoundPlan,
    SequenceHandoff,
    UnconditionalRows,
)
from smc.round.tensors import DraftReport, Lineage, ObservedDraws, RedraftReport, RoundResult, RoundSelection
from smc.stops import StopMachine
from smc.types import Decoding, ModelRole

examples = settings(max_examples=20, deadline=None)


def equal(a: object, b: object) -> bool:
    if isinstance(a, tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
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


def received(content):
    """Return a command, or a result, as the other process of a link gets it."""
    if isinstance(content, (PromptResult, RoundResult, DraftReport)):
        one = ModelResult(content, {"draft": (5, 2**62)}, {3: "why"})
        found = received(ModelResults({ModelRole.DRAFT: one})).by_role[ModelRole.DRAFT]
        assert replace(found, result=None) == replace(one, result=None)
        return found.result
    if isinstance(content, (ModelResults, Pong, MemoryUse)):
        response = WorkResponse(3, 7, content, 1, 2**62)
        found = RESPONSES.decode(RESPONSES.encode(response))
        assert replace(found, result=None) == replace(response, result=None)
        return found.result
    request = WorkRequest(3, 7, content, ModelRole.TARGET)
    found = REQUESTS.decode(REQUESTS.encode(request))
    assert replace(found, command=None) == replace(request, command=None)
    return found.command


@st.composite
def sizes(draw) -> tuple[np.random.Generator, int, int]:
    return np.random.default_rng(draw(st.integers(0, 2**32))), draw(st.integers(1, 9)), draw(st.integers(1, 5))


def law(rng: np.random.Generator, r: int) -> DistributionSpec:
    off = rng.random() < 0.3
    top_p = np.ones(r, np.float32) if off else rng.random(r, dtype=np.float32)
    temperature = rng.integers(0, 3, r)
    one = DistributionSpec.of(temperature_R=temperature, top_k_R=rng.integers(0, 5, r), top_p_R=top_p)
    return one.canonical() if rng.random() < 0.5 else one


def draws(rng: np.random.Generator, r: int, d: int) -> Draws:
    seeds = rng.integers(-(2**63), 2**63 - 1, r, dtype=np.int64)
    streams, (count, kind) = rng.integers(0, 4096, (r, d)), rng.integers(0, 3, (2, r), dtype=np.int32)
    guidance = Guidance(rng.integers(0, 99, r, dtype=np.int32), rng.random(r, dtype=np.float32))
    guidance = guidance if rng.random() < 0.5 else None
    biased = rng.integers(0, 2**31 - 1, (2, d - 1), dtype=np.int32)
    bias = rng.standard_normal(d - 1).astype(np.float32)
    one = Draws(
        law(rng, r), seeds, rng.integers(0, 1000, r), streams, Purpose.PROPOSAL, count, kind, *biased, bias, guidance
    )
    seen, repetition = rng.integers(0, 99, (2, d), dtype=np.int32), rng.random(d, dtype=np.float32)
    if rng.random() < 0.5:
        one = replace(one, seen_row_Z=seen[0], seen_token_Z=seen[1], repetition_Z=repetition)
    machines = (
        None,
        StopMachine.of([7], [], (), Constraint("choice", '["b"]', 2)),
        StopMachine.of([], [], (), Constraint("regex", "a+"), [b"ab", b"\n#"]),
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
    guidance = Guidance(rng.integers(0, 99, r, dtype=np.int32), rng.random(r, dtype=np.float32))
    guidance = guidance if rng.random() < 0.5 else None
    one = TopLogprobsSpec(
        law(rng, r),
        int(rng.integers(1, 20)),
        asked,
        least,
        tuple(machines[i] for i in rng.integers(0, 3, r)),
        guidance,
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
    assert equal(received(batch), batch)


@examples
@given(sizes(), st.booleans(), st.booleans())
def test_prompt_result(drawn, drew, raw):
    rng, r, d = drawn
    logp, log_z = (rng.standard_normal(shape).astype(np.float32) for shape in ((r, d), r))
    log_z[0] = np.nan
    top_logp = rng.standard_normal((7, d)).astype(np.float32)
    given = (
        (np.zeros(0, np.float32), np.zeros(0, np.int32)) if drew else (top_logp[:, 0], top_logp[:, 0].astype(np.int32))
    )
    nothing = (np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32), *given)
    result = (
        PromptResult(
            rng.integers(0, 99, (r, d), dtype=np.int32),
            logp,
            logp - 1 if raw else logp[:, :0],
            rng.standard_normal((r, d)),
            log_z,
            *nothing,
        )
        if drew
        else PromptResult(
            *(np.zeros((r, 0), kind) for kind in (np.int32, np.float32, np.float32, np.float64)),
            log_z,
            top_logp.astype(np.int32),
            top_logp,
            *given,
        )
    )
    assert equal(received(result), result)


@examples
@given(sizes(), st.booleans(), st.booleans())
def test_a_group_joins(drawn, shared, stopping):
    rng, n, q = drawn

    def ints(*shape: int) -> np.ndarray:
        return rng.integers(0, 2**31 - 1, shape, dtype=np.int32)

    join = SequenceHandoff(
        slots_N=ints(n),
        pages_RL=ints(1 if shared else n, 7),
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
        tokens_RL=ints(1 if shared else n, 7) if stopping else None,
    )
    found = received(join)
    assert equal(found, join)
    if stopping:
        assert np.array_equal(found.machine.next_YP, join.machine.next_YP)


@examples
@given(sizes(), st.booleans(), st.sampled_from(Contexts), st.integers(1, 3), st.integers(0, 3))
def test_a_round(drawn, flag, contexts, f, b):
    rng, a, q = drawn

    def ints(*shape: int, dtype: type = np.int64) -> np.ndarray:
        return rng.integers(0, 2**31 - 1, shape).astype(dtype)

    unconditional = UnconditionalRows(
        scale_A=rng.random(a, dtype=np.float32),
        of_A=ints(a),
        **{name: ints(q) - 2**30 for name in ("index_U", "slot_U", "shift_U", "group_U")},
        **{name: ints(q, dtype=np.int32) for name in ("first_U", "size_U", "shared_U")},
        pages_UB=ints(q, b, dtype=np.int32),
    )
    constrained = ConstrainedRows(ints(a, dtype=np.int32), ints(a), rng.random(a) < 0.5) if rng.random() < 0.5 else None
    of_group = {
        name: ints(a, dtype=np.int32)
        for name in ("first_G", "size_G", "count_G", "next_count_G", "shared_G", "decoding_G", "nodes_G", "scheme_G")
    }
    decodings = {Decoding.WALK, Decoding.DISTINCT} if flag else {Decoding.INDEPENDENT}
    kind = RoundKind(
        contexts=contexts,
        decodings=frozenset(decodings),
        biased=256 if flag else 0,
        every_step=flag,
        has_answers=not flag,
        raw_logprobs=bool(rng.random() < 0.5),
    )
    arrays = RoundArrays(
        slot_A=ints(a),
        group_A=ints(a),
        particle_A=ints(a),
        seed_A=rng.integers(-(2**63), 2**63 - 1, a, dtype=np.int64),
        round_A=ints(a),
        alpha_A=rng.random(a),
        exponent_A=rng.random(a, dtype=np.float32),
        **of_group,
        chain_P=ints(q if flag else 0),
        distribution_P=ints(q if flag else 0),
        threshold_G=rng.random(a),
        target_pages_AQ=ints(a, 0 if flag else q, dtype=np.int32),
        begin_pages_AQ=ints(a, 1 + flag, dtype=np.int32),
        branch_pages_XB=ints(a * f, b, dtype=np.int32),
    )
    plan = RoundPlan(
        kind=kind,
        columns=77,
        arrays=arrays,
        target_distribution=law(rng, a),
        draft_distribution=law(rng, a),
        target_unconditional=unconditional if rng.random() < 0.5 else None,
        penalties=Penalties(*rng.random((3, a), dtype=np.float32), ints(a)) if rng.random() < 0.5 else None,
        constraints=constrained,
    ).sized()
    found = received(plan)
    assert equal(found, plan) and found.kind == plan.kind


@examples
@given(sizes(), st.integers(0, 4), st.booleans())
def test_round_result(drawn, w, raw):
    rng, a, q = drawn
    logp = rng.standard_normal((a, q)).astype(np.float32)
    logp[0, 0] = np.nan
    result = RoundResult(
        selection=RoundSelection(
            particles=NextParticles(*rng.integers(0, a, (2, a)), rng.random(a) < 0.5, rng.standard_normal(a)),
            taken_A=rng.integers(0, q, a),
            cut_A=rng.integers(0, q, a),
            bonus_A=rng.integers(-1, 9, a),
            ended_A=rng.random(a) < 0.5,
            text_A=rng.integers(0, 9, a),
        ),
        grown_AQ=rng.integers(0, 2**17, (a, q), dtype=np.int32),
        logq_AQ=logp + 1,
        logp_AQ=logp,
        first_logp_A=logp[:, 0].copy(),
        raw_logp_AQ=logp - 1 if raw else logp[:, :0],
        statistics=SelectionStatistics(rng.standard_normal(a), rng.random(a), *(rng.random((2, a)) < 0.5)),
        **{name: rng.random(a) < 0.5 for name in ("draft_nan_G", "target_nan_G", "hit_G")},
        lineage=Lineage(rng.integers(0, 99, (a, w), dtype=np.int32), *rng.integers(0, 9, (2, a), dtype=np.int32)),
    )
    assert equal(received(result), result)
    report = DraftReport(result.lineage, ObservedDraws(*rng.random((3, a), dtype=np.float32)))
    assert equal(received(report), report)
    again = RedraftReport(
        root_A=rng.integers(0, a, a, dtype=np.int32),
        tokens_AK=rng.integers(0, 2**17, (a, q), dtype=np.int32),
        count_A=rng.integers(0, q, a, dtype=np.int32),
        ended_A=rng.random(a) < 0.5,
        share_A=logp[:, 0].copy(),
        lineage=result.lineage,
    )
    report = report._replace(redrafted=again)
    assert equal(received(report), report)


def test_arrays_can_be_written_to():
    """With a read-only view of the message torch would warn, and in-place writes would fail."""
    numbers = np.arange(3, dtype=np.int32)
    pages = received(PromptBatch(numbers, numbers, numbers, numbers.astype(np.int64))).pages_B
    pages[0] = 5
    assert pages.tolist() == [5, 1, 2] and numbers[0] == 0


@pytest.mark.parametrize("message", [Ping(), Reconnect(4, 0.5), Pong(), MemoryUse(2**40)])
def test_messages_without_arrays(message):
    assert received(message) == message


@dataclass(frozen=True)
class Held:
    """One message of each kind of type."""

    number: int
    share: float
    name: str | int | None
    ids: tuple[int, ...] = ()
    counts: dict[str, float] = field(default_factory=dict)
    one_A: np.ndarray = field(default_factory=lambda: np.zeros(0))
    two_AQ: np.ndarray | None = None
    size: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.ids))


HELD = Codec[Held](Held)


def test_what_is_computed_is_not_sent():
    held = Held(1, 2.0, None, (3, 4), {"a": 0.5})
    assert equal(HELD.decode(HELD.encode(held)), held) and held.size == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"number": 1.5},
        {"number": "1"},
        {"number": None},
        {"share": "x"},
        {"name": 1.5},
        {"ids": (1, "2")},
        {"ids": 7},
        {"counts": {1: 0.5}},
        {"counts": {"a": []}},
        {"one_A": 3},
        {"one_A": np.zeros((2, 2))},
        {"one_A": np.zeros(3), "two_AQ": np.zeros((2, 4))},
    ],
)
def test_values_of_other_types_are_refused(wrong):
    """A value of another type, a wrong number of axes, or axes that disagree: refused, and never read as another
    value."""
    given = {"number": 1, "share": 2.0, "name": None, "one_A": np.ones(3)} | wrong
    with pytest.raises((LinkError, TypeError)):
        HELD.decode(HELD.encode(Held(**given)))


def test_numbers_of_numpy_arrive_as_numbers():
    found = HELD.decode(HELD.encode(Held(np.int64(2**40), np.float32(0.5), np.int32(7), (np.int64(3),))))
    assert (found.number, found.share, found.name, found.ids) == (2**40, 0.5, 7, (3,))
    assert type(found.number) is int and type(found.ids[0]) is int


def test_damaged_messages_are_refused():
    data = HELD.encode(Held(1, 2.0, "three", (4,), {"five": 6.0}, np.ones(7)))
    for size in range(len(data)):
        with pytest.raises(LinkError):
            HELD.decode(data[:size])


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (3, "12"),
        (3, b"12"),
        (3, {4: 5}),
        (4, [["five", 6.0]]),
        (4, None),
        (5, [6, 1 << 60]),  # a number in place of the bytes: their size
        (5, [6, [0] * 8]),
        (5, [-1, bytes(8)]),
        (5, [6, bytes(8), -1]),
        (5, [6, bytes(8), 1.0]),
        (6, [-1, []]),
        (6, [True, []]),
        (6, [0, [], 1]),
    ],
)
def test_content_of_another_form_is_refused(at: int, value: Any):
    """Whatever a sender writes: it becomes nothing else, takes no memory of its choosing, and raises LinkError."""
    names = ("number", "share", "name", "ids", "counts", "one_A")
    types = get_type_hints(Held)
    codec = Codec(make_dataclass("Content", [*((name, types[name]) for name in names), ("choice", Ping | Pong)]))
    content: list[Any] = [1, 2.0, None, [4], {"five": 6.0}, [6, bytes(8)], [0, []]]
    assert codec.decode(codec.hash + msgpack.packb(content)).ids == (4,)
    content[at] = value
    with pytest.raises(LinkError):
        codec.decode(codec.hash + msgpack.packb(content))


def test_another_build_is_refused():
    """A type that differs anywhere, however deep, has another hash: a field's name, type or place, a value of an
    enum."""

    def made(**types: Any) -> bytes:
        return Codec(make_dataclass("Message", list(types.items()))).hash

    colours = [StrEnum("Colour", names) for names in (["RED"], ["RED", "BLUE"])]
    inner = [make_dataclass("Inner", [(name, int)]) for name in ("a", "b")]
    hashes = [
        *(made(a=int, b=str), made(b=str, a=int), made(a=int, b=bytes), made(a=int), made(a=int | None, b=str)),
        *(made(a=colour) for colour in colours),
        *(made(a=tuple[one, ...]) for one in inner),
        *(made(a=kind) for kind in (list[int], tuple[int, ...], frozenset[int], dict[str, int], np.ndarray)),
    ]
    assert len(set(hashes)) == len(hashes)
    with pytest.raises(LinkError, match=r"this side has .*same version of smcserve"):
        REQUESTS.decode(RESPONSES.encode(WorkResponse(3, 7, Pong())))


def test_only_declared_types_can_be_sent():
    for kind in (object, Any, set[int], complex):
        with pytest.raises(TypeError, match="messages cannot hold"):
            Codec(make_dataclass("Message", [("a", kind)]))
    with pytest.raises(TypeError, match="messages cannot hold arrays of complex128"):
        HELD.encode(Held(1, 2.0, None, one_A=np.zeros(2, complex)))
