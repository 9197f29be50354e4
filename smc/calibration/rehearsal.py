"""Rounds of nobody, so that every kind that requests of usual settings ask for is compiled and recorded before anybody waits for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from smc.algorithm.expansion import Kind
from smc.api.engine_config import EngineConfig
from smc.executor.plan import Contexts, Program, RoundPlan
from smc.laws import LawSpec
from smc.scheduler.methods import PROGRAMS, Shape
from smc.scheduler.round_plan import bucket

TURNS = 2
"""Rounds of each kind: the first compiles its kernels, the second is recorded."""
PROCESSORS: tuple[tuple[str, ...], ...] = ((), ("top_k",), ("top_p",), ("min_p",), ("min_p", "top_k", "top_p"))
"""Of truncated laws: `LawSpec.canonical` knows no others."""
TRUNCATED_PLACES = {Program.PAIR: (8,), Program.TARGET: (1, 8)}
"""Of rounds with truncated laws, which are rehearsed in few sizes: their kernels are then there, and recording others costs a round."""


KINDS = (
    (Program.PAIR, frozenset({Kind.BEST})),
    (Program.PAIR, frozenset({Kind.DISTINCT})),
    (Program.TARGET, frozenset({Kind.INDEPENDENT})),
)
"""Programs and kinds that are rehearsed: those of default settings."""


def rehearsal(
    config: EngineConfig,
    context: int,
    wanted: Sequence[tuple[Program, frozenset[Kind]]] = KINDS,
    truncated: Sequence[tuple[str, ...]] = PROCESSORS,
) -> Iterator[RoundPlan[np.ndarray]]:
    """Plans to be asked for in this order: of all that usual settings ask for, or less."""
    sizes = sorted({bucket(places) for places in range(1, config.max_slots + 1)})
    for (program, kinds), contexts in product(wanted, Contexts):
        few = {min(places, sizes[-1]) for places in TRUNCATED_PLACES[program]}
        for shape, places, processors in product(_shapes(config, program, kinds), sizes, truncated):
            if (processors and places not in few) or contexts not in _contexts(config.width(context), program, kinds, places):
                continue
            plan = empty_plan(program, shape, places, config.max_slots, contexts, processors=processors, kinds=kinds)
            yield from [plan] * TURNS


def _contexts(width: int, program: Program, kinds: frozenset[Kind], places: int) -> set[Contexts]:
    """Those that rounds of so many places can have, where tables have room for so many positions."""
    groups = {places} if program is not Program.PAIR else {1, places} if kinds == {Kind.BEST} else {1}
    return {Contexts.of(columns, places, count) for columns in (0, width) for count in groups}


def _shapes(config: EngineConfig, program: Program, kinds: frozenset[Kind]) -> list[Shape]:
    """That of the config; and where costs decide about trees, with one row ahead for each of theirs, too."""
    shape = PROGRAMS[program].shape(config)
    lean = kinds == {Kind.BEST} and shape.branches > 1 and config.drafting == "costs"
    return [shape, replace(shape, branches=1)] if lean else [shape]


def empty_plan(
    program: Program,
    shape: Shape,
    places: int,
    slots: int,
    contexts: Contexts,
    *,
    processors: tuple[str, ...] = (),
    kinds: frozenset[Kind] = frozenset({Kind.INDEPENDENT}),
) -> RoundPlan[np.ndarray]:
    """A round whose places are all padding."""
    whole, wide = np.zeros(places, dtype=np.int32), np.zeros(places, dtype=np.int64)
    one = np.ones(places, dtype=np.float32)
    law = LawSpec.of(one, wide, one, one * 0, one)
    law = replace(law.canonical(), active=law.canonical().active | set(processors))
    return RoundPlan(
        program=program,
        contexts=contexts,
        kinds=kinds,
        columns=1 + max(shape.target, shape.begin + shape.branch),
        target_law=law,
        draft_law=law,
        slot_A=wide + slots,
        group_A=wide + places - 1,
        particle_A=wide,
        seed_A=wide,
        round_A=wide + 1,
        alpha_A=np.ones(places),
        first_G=whole,
        size_G=whole,
        count_G=whole,
        draws_G=whole,
        shared_G=whole,
        threshold_G=np.zeros(places),
        kind_G=whole,
        chain_C=wide[:0],
        law_C=wide[:0],
        scheme_G=whole,
        target_pages_AQ=np.zeros((places, shape.target), dtype=np.int32),
        begin_pages_AP=np.zeros((places, shape.begin), dtype=np.int32),
        branch_pages_XB=np.zeros((places * shape.branches, shape.branch), dtype=np.int32),
    )
