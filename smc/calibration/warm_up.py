"""Warm-up: the rounds and requests that an engine runs before it accepts requests, so that none of the first requests
waits for a compilation or a graph capture. A first request runs through both models. Where kernels are compiled, dummy
rounds of all usual kinds follow, and then a request of every rarer kind.

A dummy round has only padding rows, which read and write the dummy page."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from smc.api.engine_config import PATHS, EngineConfig
from smc.api.limits import MAX_PARTICLES
from smc.api.request import Output, Request
from smc.api.sampling_params import Method, SamplingParams
from smc.distributions import NO_PROCESSORS, TRUNCATIONS, DistributionSpec, Processors
from smc.executor.forward import PROMPT_ROW, PROMPT_SIZES
from smc.executor.messages import Pending, PromptBatch
from smc.round.plan import SHORT, SHORT_SINGLE, Contexts, Penalties, RoundArrays, RoundKind, RoundPlan
from smc.scheduler.admission import QueueFull
from smc.scheduler.engine import Engine
from smc.scheduler.methods import RULES_OF_ROUNDS, PagesPerRow, fixed_steps, rules_of
from smc.scheduler.planner import NODE_SHARES, DraftSize, bucket, coarse_bucket, room
from smc.types import BOTH_MODELS, Decoding, ModelRole

logger = logging.getLogger(__name__)

REPEATS = 2
"""Dummy rounds and prompts of each kind: the first compiles its kernels, the second is captured."""
TRUNCATED_SIZES = {BOTH_MODELS: (8,), Decoding.TARGET.roles: (1, 8)}
"""Sizes of dummy rounds with truncated distributions. These compile all kernels; capturing another size later costs one
round."""
DECODINGS = (
    frozenset({Decoding.WALK}),
    frozenset({Decoding.DISTINCT}),
    frozenset({Decoding.TARGET}),
)
"""Ways of decoding in dummy rounds: those to which default settings lead."""
SALT = "warm-up"
"""Cache salt of warm-up requests, so that no other request shares their prefixes."""
ROWS = 8
"""Rows of a request that represents all requests of its kind."""
ROUNDS = 4
"""Minimum number of rounds of each warm-up request: the first compiles, the second is captured, and one is always
launched ahead."""
RequestKind = dict[str, Any]
"""Sampling parameters of a request that differ from the defaults."""
DISTINCT: RequestKind = {"method": "smc", "population": "distinct"}
INDEPENDENT: RequestKind = {"method": "smc", "population": "independent"}
REJECTION: RequestKind = {"method": "exact", "verification": "rejection"}
GUIDED: RequestKind = {"guidance_scale": 1.5}
TRUNCATED: RequestKind = {"top_k": 40, "top_p": 0.9}
BIASED: RequestKind = {"logit_bias": ((0, 0.5),)}
PENALISED: RequestKind = {"repetition_penalty": 1.1}
RARE: tuple[RequestKind, ...] = (
    INDEPENDENT,
    REJECTION,
    {"method": "draft"},
    {"method": "target", "logprobs": True, "top_logprobs": 5},
    DISTINCT | {"logprobs": True},
    {"method": "target"} | BIASED,
    DISTINCT | BIASED,
    DISTINCT | TRUNCATED | BIASED,
    DISTINCT | PENALISED,
    {"method": "exact"} | PENALISED,
    {"method": "target"} | PENALISED,
    GUIDED | DISTINCT,
    GUIDED | INDEPENDENT,
    GUIDED | REJECTION,
    GUIDED | {"method": "exact"},
    GUIDED | {"method": "target"},
    GUIDED | PENALISED | {"method": "exact"},
    GUIDED | PENALISED | {"method": "target"},
)
"""Kinds of requests for which there are no dummy rounds. Biased SMC requests also run alone, because beside exact
requests other kernels draw the draft's tokens: those that couple them to the target's draws."""
LONG: tuple[tuple[RequestKind, ...], ...] = (({"method": "draft"},), ({"method": "draft"},) * 2)
"""Requests whose rounds after a long prompt no dummy round covers: one model alone begins with one token, whereas
blocks in lockstep begin with two; and two such requests have one row each."""
COMMON: tuple[RequestKind, ...] = (DISTINCT, {"method": "exact"}, INDEPENDENT)
EVERY: tuple[RequestKind, ...] = (DISTINCT | {"alpha": 2.0}, {"method": "exact"}, INDEPENDENT, REJECTION)
TOGETHER: tuple[tuple[RequestKind, ...], ...] = (
    COMMON,
    *(tuple(kind | sampling for kind in EVERY) for sampling in ({}, TRUNCATED, BIASED, TRUNCATED | BIASED)),
)
"""Kinds of requests that share rounds. Kernels over logits are compiled separately for truncated and other
distributions, and for the models' logits and for float32, to which logits with biases are converted. These rounds cover
all combinations."""


class UsualSampling(NamedTuple):
    """What rounds of requests have that leave out all sampling settings."""

    truncation: Processors = NO_PROCESSORS
    """One of `TRUNCATIONS`."""
    penalised: bool = False

    @staticmethod
    def of(defaults: Mapping[str, Any]) -> UsualSampling:
        """`defaults`: of `SamplingParams`, by name."""
        params = SamplingParams(**defaults)
        spec = DistributionSpec.of_settings([params], [params.temperature]).canonical()
        return UsualSampling(spec.active & Processors.TRUNCATION, params.penalised)


AS_IT_IS = UsualSampling()
"""The model's own distribution."""


def warm_up_plans(
    config: EngineConfig,
    context: int,
    wanted: Sequence[frozenset[Decoding]] = DECODINGS,
    truncated: Sequence[Processors] = TRUNCATIONS,
    usual: UsualSampling = AS_IT_IS,
) -> list[RoundPlan[np.ndarray]]:
    """Return plans of dummy rounds, to be launched in this order: for all rounds to which default settings lead, or for
    fewer. Rounds with another truncation than the usual one, which is among `truncated`, or without usual penalties
    have few sizes. Rounds that verify whole blocks of the round before have no nodes.

    The largest come first: recordings share their memory, and what a large one has freed has room for smaller ones."""

    def tokens(plan: RoundPlan[np.ndarray]) -> int:
        return plan.kind.batch_size * max(plan.kind.queries, plan.kind.branches)

    return sorted(_plans(config, context, wanted, truncated, usual), key=tokens, reverse=True)


def _plans(
    config: EngineConfig,
    context: int,
    wanted: Sequence[frozenset[Decoding]],
    truncated: Sequence[Processors],
    usual: UsualSampling,
) -> Iterator[RoundPlan[np.ndarray]]:
    """Yield the plans, each `REPEATS` times."""
    sizes = sorted({bucket(batch_size) for batch_size in range(1, config.max_slots + 1)})
    for decodings, contexts in product(wanted, Contexts):
        few = {min(batch_size, sizes[-1]) for batch_size in TRUNCATED_SIZES[_roles(decodings)]}
        shapes = _shapes(config, decodings)
        whole = shapes[0]
        for (shape, steps, share, again, is_longer), batch_size, processors in product(shapes, sizes, truncated):
            is_chosen = steps != whole.steps or share or (again and not config.redrafted)
            is_usual = processors == usual.truncation
            if is_chosen and not is_usual:
                continue
            is_small = is_chosen or shape.branches < whole.shape.branches
            if is_small and is_usual and batch_size != coarse_bucket(batch_size, config.max_slots):
                continue
            if is_longer and batch_size > ROWS:
                continue
            if share and (batch_size == 1 or (steps and batch_size not in few)):
                # A single row has nothing in common with others. Fewer tokens in one size compile all kernels.
                continue
            if (not is_usual and batch_size not in few) or contexts not in _contexts(
                config.width(context), decodings, batch_size
            ):
                continue
            given = (decodings, shape, batch_size, config.max_slots, contexts)
            queries = shape.target if is_longer else queries_of(config, shape, steps)
            nodes = int(share * batch_size * queries)
            size = DraftSize(shape.branches, steps, nodes, again)
            queries = max(queries, again + 1) if again else queries
            plan = partial(padding_plan, *given, processors=processors, queries=queries, size=size)
            if is_usual and usual.penalised:
                yield from [plan(penalised=True)] * REPEATS
                if is_chosen or batch_size not in few:
                    continue
            yield from [plan()] * REPEATS


def _contexts(width: int, decodings: frozenset[Decoding], batch_size: int) -> set[Contexts]:
    """Return the contexts that rounds of `batch_size` rows can have if block tables have room for `width` positions."""
    one_row = _roles(decodings) != BOTH_MODELS
    groups = {batch_size} if one_row else {1, batch_size} if decodings == {Decoding.WALK} else {1}
    return {Contexts.of(columns, batch_size, count) for columns in (0, width) for count in groups}


def _roles(decodings: frozenset[Decoding]) -> tuple[ModelRole, ...]:
    return next(iter(decodings)).roles


class DummyShape(NamedTuple):
    """What dummy rounds draft and verify."""

    shape: PagesPerRow
    steps: int | None = None
    """As of `DraftSize`."""
    share: float = 0.0
    """Share of the tokens that run as nodes; 0: all run by themselves."""
    redrafted: int = 0
    is_longer: bool = False
    """Whether blocks of K tokens are verified, because the round before has drafted more than this one."""


def _shapes(config: EngineConfig, decodings: frozenset[Decoding]) -> list[DummyShape]:
    """Return the shapes of dummy rounds. The first is that of the config, with all tokens of a block. Where the latency
    model chooses trees, those with fewer branches a row, with fewer tokens, that draft again and, unless the target
    runs paths, with nodes follow."""
    shape, again = RULES_OF_ROUNDS[_roles(decodings)].shape(config), config.redrafted
    if decodings != {Decoding.WALK}:
        return [DummyShape(shape, fixed_steps(config, decodings))]
    if config.drafting != "adaptive":
        return [DummyShape(shape, redrafted=again)]
    levels, shares = config.block_levels[1:], () if config.verified == PATHS else NODE_SHARES
    return [
        *(
            DummyShape(replace(shape, branches=branches), None if steps == config.block else steps, redrafted=more)
            for steps, branches, more in config.draft_sizes
        ),
        *(DummyShape(shape, steps, is_longer=True) for steps in levels if config.lookahead and not again),
        *(DummyShape(shape, None, share, again) for share in shares),
        *(DummyShape(shape, steps, share, again) for steps in levels for share in shares[:1]),
    ]


def queries_of(config: EngineConfig, shape: PagesPerRow, steps: int | None) -> int:
    """Return the number of tokens of a block that the target runs in rounds that draft `steps` tokens for a row, None:
    K."""
    steps = steps or config.block
    if config.lookahead:
        steps = config.level_of(steps)
    return min(shape.target, config.scored(steps))


def padding_plan(
    decodings: frozenset[Decoding],
    shape: PagesPerRow,
    batch_size: int,
    slots: int,
    contexts: Contexts,
    *,
    processors: Processors = NO_PROCESSORS,
    queries: int | None = None,
    size: DraftSize | None = None,
    penalised: bool = False,
) -> RoundPlan[np.ndarray]:
    """Return the plan of a round whose rows are all padding. `queries`: tokens of a block that the target runs; by
    default all. `size`: how much is drafted, by default a block on all branches of the shape. `penalised`: the round
    has penalties, which are neutral."""
    size = size or DraftSize(shape.branches, None)
    whole, wide = np.zeros(batch_size, dtype=np.int32), np.zeros(batch_size, dtype=np.int64)
    one = np.ones(batch_size, dtype=np.float32)
    distribution = DistributionSpec.plain(batch_size).canonical()
    distribution = distribution._replace(active=distribution.active | processors)
    arrays: RoundArrays[np.ndarray] = RoundArrays(
        slot_A=wide + slots,
        group_A=wide + batch_size - 1,
        particle_A=wide,
        seed_A=wide,
        round_A=wide + 1,
        alpha_A=np.ones(batch_size),
        exponent_A=one,
        first_G=whole,
        size_G=whole,
        count_G=whole,
        next_count_G=whole,
        shared_G=whole,
        threshold_G=np.zeros(batch_size),
        decoding_G=whole,
        chain_P=wide[:0],
        distribution_P=wide[:0],
        nodes_G=whole,
        scheme_G=whole,
        target_pages_AQ=np.zeros((batch_size, shape.target if queries is None else queries), dtype=np.int32),
        begin_pages_AQ=np.zeros((batch_size, shape.begin), dtype=np.int32),
        branch_pages_XB=np.zeros((batch_size * shape.branches, shape.branch), dtype=np.int32),
    )
    columns = 1 + max(shape.target, shape.begin + shape.branch)
    kind = RoundKind(contexts, decodings, size.steps, nodes=size.nodes, redrafted=size.redrafted)
    pages_AB = np.zeros((batch_size, shape.branch), dtype=np.int32) if size.redrafted else None
    none = np.zeros(batch_size, dtype=np.float32)
    penalties: Penalties[np.ndarray] | None = Penalties(none, none, one, wide) if penalised else None
    return RoundPlan(
        kind, columns, arrays, distribution, distribution, penalties=penalties, redraft_pages_AB=pages_AB
    ).sized()


def warm_up_prompts(engine: Engine) -> None:
    """Run short prompts through both models of an idle engine: of each number of rows for which a GPU records a
    pass."""
    for role, worker in engine.workers.items():
        allocator = engine.memory.allocators[role]
        pages_B = allocator.allocate(min(PROMPT_ROW, engine.context, allocator.num_free))
        try:
            for rows in PROMPT_SIZES if len(pages_B) else ():
                batch = PromptBatch(
                    # All rows write the same to these pages.
                    pages_B=np.tile(pages_B, rows),
                    starts_R=np.zeros(rows, dtype=np.int32),
                    counts_R=np.full(rows, len(pages_B), dtype=np.int32),
                    tokens_T=np.zeros(rows * len(pages_B), dtype=np.int64),
                )
                for _ in range(REPEATS):
                    worker.run_prompts(batch).result()
        finally:
            allocator.free(pages_B)


def first_request(config: EngineConfig, context: int, vocab: int) -> Request:
    """Return a short request, with which an engine begins: of two particles if there are slots and surely pages for
    them, else of one."""
    size, tokens = config.first_lengths(context)

    def of(particles: int) -> SamplingParams:
        return SamplingParams(method=Method.SMC, seed=0, ignore_eos=True, particles=particles, max_tokens=tokens)

    params = of(min(2, config.max_slots))
    if max(rules_of(params).most_pages(config, params, size).values()) > (config.pages or config.least_pages(context)):
        params = of(1)
    return Request("warm-up", tuple(i % vocab for i in range(size)), params)


def warm_up(
    engine: Engine,
    plans: Iterable[RoundPlan],
    rare: Iterable[Sequence[Request]] = (),
    progress: Callable[[float], None] = lambda share: None,
) -> None:
    """Run dummy rounds, then each list of requests after the previous one, on an idle engine, which then forgets them.
    A request that the engine rejects is left out; one that fails is logged, since only its kind may be affected.
    `progress` is called with the share that is done: a list of requests counts as its `ROUNDS` rounds."""
    plans, rare = list(plans), list(rare)
    last: Pending | None = None
    whole = max(1, len(plans) + ROUNDS * len(rare))
    for done, plan in enumerate(plans):
        progress(done / whole)
        # A round is launched while the previous one runs.
        pending, last = last, engine.executor.round(plan)
        if pending is not None:
            pending.result()
    if last is not None:
        last.result()
    for done, requests in enumerate(rare):
        progress((len(plans) + ROUNDS * done) / whole)
        outputs: list[Output] = []
        for request in requests:
            try:
                outputs += _submit(engine, request)
            except (ValueError, QueueFull) as error:
                logger.info("left out of the warm-up, since this engine rejects it: %s: %s", request.request_id, error)
        for output in (*outputs, *engine.run(())):
            if output.answer and output.answer.error:
                logger.error("%s failed: %s", output.request_id, output.answer.error)
    engine.forget()
    progress(1.0)


def _submit(engine: Engine, request: Request) -> list[Output]:
    """Submit a request as soon as the queue has room. Returns the outputs of other requests until then."""
    outputs: list[Output] = []
    while True:
        try:
            engine.submit(request)
            return outputs
        except QueueFull:
            if engine.idle:
                raise
            outputs += engine.step()


def rare_requests(config: EngineConfig, context: int, vocab: int) -> Iterator[list[Request]]:
    """Yield lists of requests to be run one after another: of every kind alone, of several kinds in one round, and of
    as many rows as possible, at both models and at the target alone (in one round if there is one micro-batch with
    enough pages). Only few follow after a long prompt: dummy rounds have compiled most kernels of those rounds."""
    tokens = ROUNDS * (config.block + 1)
    few, long = (*((kind,) for kind in RARE), *TOGETHER), (*LONG, COMMON)
    # After the longer prompt, if there is room for it, no round has short contexts.
    longest = [(size, long) for size in (SHORT + 1, SHORT_SINGLE + 1) if context - size >= tokens][-1:]
    for size, lists in ((4, few), *longest):
        most = min(tokens, context - size)
        if most < 1:
            continue
        prompt = tuple(i % vocab for i in range(size))
        for kinds in lists:
            yield _numbered(_request(kind, prompt, most, config, vocab, len(kinds)) for kind in kinds)
        for kind in ({"method": "exact"}, {"method": "target"}):
            yield _crowd(kind, prompt, min(most, 2 * (config.block + 1)), config, vocab)


def _crowd(kind: RequestKind, prompt: tuple[int, ...], tokens: int, config: EngineConfig, vocab: int) -> list[Request]:
    """Return requests with as many rows as possible: guided requests, and others in the remaining slots, so that the
    number of conditional and unconditional rows together is largest."""
    counts = range(1, config.max_slots // 2 + 1)
    guided = max(counts, key=lambda count: crowded(count, config.max_slots - 2 * count), default=0)
    parts = [*_parts(kind | GUIDED, guided), *_parts(kind, config.max_slots - 2 * guided)]
    return _numbered(_request(part, prompt, tokens, config, vocab) for part in parts)


def _numbered(requests: Iterable[Request]) -> list[Request]:
    return [replace(request, request_id=f"{request.request_id}, {i}") for i, request in enumerate(requests)]


def crowded(guided: int, others: int) -> int:
    """Return the rows of a round of `guided` guided particles and `others`, including unconditional rows and
    padding."""
    batch_size = bucket(guided + others)
    return batch_size + room(guided, batch_size)


def _parts(kind: RequestKind, rows: int) -> list[RequestKind]:
    """Return requests of a kind that have `rows` rows in all."""
    if kind["method"] == "target":
        return [kind] * rows
    return [kind | {"particles": min(MAX_PARTICLES, rows - begin)} for begin in range(0, rows, MAX_PARTICLES)]


def _request(
    kind: RequestKind, prompt: tuple[int, ...], tokens: int, config: EngineConfig, vocab: int, together: int = 1
) -> Request:
    """Return a request of a kind. `together`: number of requests that must fit into the slots in parallel."""
    params = SamplingParams(seed=0, ignore_eos=True, max_tokens=tokens, **kind)
    if params.particles:
        most = config.chains(vocab) if params.decoding is Decoding.REJECTION else config.max_slots
        slots = config.max_slots // (params.slots_per_row * together)
        params = replace(params, particles=max(1, min(kind.get("particles", ROWS), most, slots)))
    what = {name: value for name, value in kind.items() if name != "logit_bias"}
    name = f"warm-up {what} {len(params.logit_bias)} biases, {len(prompt)} tokens"
    return Request(name, prompt, params, SALT, negative_prompt=prompt[:1] if params.guided else None)
