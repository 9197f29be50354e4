"""Configuration of an engine, common to all of its requests. Checked when built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypedDict

from smc.api.limits import UNSET
from smc.api.sampling_params import is_potential
from smc.api.settings import ENGINE, OneOf, above_zero, at_least, check_settings, flag, setting, within
from smc.types import ModelRole, Numerics

FORMS = ("lockstep", "lookahead")
MAX_BLOCK = 32
MAX_BRANCHES = 32
MOST_PAGES = 1 << 23
"""Maximum pages of a pool by default: the scheduler stores a few bytes for each."""
MAX_PAGES = 2_000_000_000
"""Maximum of `pages`: the numbers of pages have 32 bits."""
MAX_STOPS = 64
"""Maximum number of different sets of stop tokens and strings among requests that run in parallel."""
FLOAT_BYTES = 4
MAX_PREFILL_SHARE = 100.0
"""Maximum factor by which prompts may lengthen rounds."""
DISTRIBUTION_BYTES = 1 << 30
"""Memory on a model's device for the token distributions of draft chains, if `max_chains` is not set."""
MAX_QUEUE = 256
"""Default number of requests that may wait in a service; in the library there is no limit."""
MAX_POTENTIAL_TIMEOUT = 3600.0
"""Maximum of `potential_timeout`, in seconds."""
GPU_PREFILL: PrefillSettings = {"prefill_chunk": 4096, "prefill_share": 0.4}
"""Defaults for models on GPUs: large matrix products, and rounds that prompts lengthen by less than half."""
SMC_BLOCK = 5
"""Default of `smc_block`: with K = 5, 6 and 8 SMC solves 73.8, 71.0 and 68.8% of the same problems."""
LOGIT_BYTES = {ModelRole.TARGET: 16, ModelRole.DRAFT: 28}
"""Bytes for each logit, half of them in recordings: in bfloat16, penalised in float32, at the draft also
log-probabilities and counts of tokens; at the target a row has one of these counts for all its tokens."""
BLOCK_LEVELS = (24, 16, 12, 8, 6, 5, 4, 3, 2, 1)
"""Numbers of drafted tokens for which kernels are compiled, unless K is smaller."""


def _pairs(potentials: Mapping[str, str] | tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Convert potentials to pairs of a name and a path module:function. Raises ValueError if one of them is
    malformed."""
    pairs = tuple(potentials.items() if isinstance(potentials, Mapping) else potentials)
    for name, path in pairs:
        if not is_potential(name) or not isinstance(path, str) or not all(path.partition(":")[::2]):
            raise ValueError(f"potentials has {name!r}: {path!r}; allowed: a name, and module:function")
    return pairs


class PrefillSettings(TypedDict):
    """The fields of `EngineConfig` that concern prompts."""

    prefill_chunk: int
    prefill_share: float


NODES, PATHS = "nodes", "paths"


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine. Raises ValueError naming the field, the value and what is allowed."""

    PANEL: ClassVar[str] = ENGINE

    form: str = setting(
        "lookahead",
        OneOf(FORMS),
        "Form of a round. lockstep: the models work one after the other; lookahead: at the same time.",
        "FORM",
    )
    block: int = setting(
        8, within(1, MAX_BLOCK), "K, the number of tokens drafted in a round, 1..32.", "K", names=("--block", "-k")
    )
    smc_block: int | None = setting(
        None,
        within(1, MAX_BLOCK),
        "K of requests whose answers depend on it, which are those of SMC and of verification rejection; at most "
        "--block. Larger blocks are faster, and SMC solves fewer problems with them. Default: 5, or a smaller "
        "--block.",
        "K",
    )
    branches: int = setting(
        UNSET,
        within(1, MAX_BRANCHES),
        "F, the number of branches of the next block that are drafted for each particle, 1..32; lookahead only. "
        "Default: 4.",
        "F",
        names=("--branches", "-f"),
    )
    micro_batches: int = setting(
        1,
        within(1, 4),
        "Number of micro-batches whose rounds alternate, 1..4. Default: 1; 2 in lockstep with placement apart.",
        has_flag=False,
    )
    """More than one pays in lockstep, if each model has processes of its own."""
    max_slots: int = setting(
        64,
        within(1, 65536),
        "Slots of all running requests together: one for each particle or row, two if the request is guided.",
        "COUNT",
    )
    max_chains: int | None = setting(
        None,
        at_least(0),
        "Maximum number of draft chains of all running requests with verification rejection; 0 refuses such "
        "requests. Default: as many as take 1 GiB of memory at either model, at most max-slots.",
        has_flag=False,
    )
    """For each chain, memory for token distributions over the whole vocabulary is reserved (smc/executor/verify.py)."""
    max_context: int | None = setting(
        None,
        at_least(2),
        "Maximum tokens of a prompt and its answer together. Default: the context that the models were made for.",
        "TOKENS",
    )
    pages: int | None = setting(
        None,
        within(2, MAX_PAGES),
        "Token positions in the KV pool of each model. Default: on a GPU what fits, up to the longest context in "
        "every slot and as much again for the prefix cache; on a CPU 512 for each slot, and at least one request "
        "of the longest context.",
        "COUNT",
    )
    prefill_chunk: int = setting(
        128,
        within(1, 1 << 20),
        "Maximum number of prompt tokens that run between two rounds. Default: 128, on GPUs 4096.",
        has_flag=False,
    )
    prefill_share: float | None = setting(
        None,
        above_zero(MAX_PREFILL_SHARE),
        "Maximum time spent on prompts, as a share of the time spent on rounds. Default: 0.4 on GPUs, no limit on "
        "a CPU.",
        has_flag=False,
    )
    drafting: str = setting(
        "adaptive",
        OneOf(("adaptive", "always")),
        "Tree size in exact decoding. adaptive: the size that pays by the latency model, possibly none; always: "
        "the size that the request asks for. Answers are the same.",
        has_flag=False,
    )
    redrafting: str = setting(
        "adaptive",
        OneOf(("adaptive", "always", "never")),
        "Whether the draft drafts again after a miss in look-ahead, before the target goes on (exact decoding). "
        "adaptive: as many tokens as pay by the latency model, possibly none; always: a whole block. Answers are "
        "the same.",
        has_flag=False,
    )
    prefix_cache: bool = setting(
        True, flag(), "Compute every prompt in full, even if an earlier prompt began with the same tokens."
    )
    """Keep the keys and values of prompts and answers, for later prompts that begin with the same tokens."""
    logprobs_mode: str = setting(
        "raw",
        OneOf(("raw", "processed")),
        "Distribution of reported log-probabilities. raw: the softmax of the target's logits; processed: the "
        "distribution that tokens are drawn from, after temperature, truncation, biases, penalties, constraints "
        "and guidance. Answers are the same.",
        has_flag=False,
    )
    verified: str | None = setting(
        None,
        OneOf((NODES, PATHS)),
        "What the target runs of a tree of exact decoding. nodes: tokens that rows have in common once; paths: all "
        "tokens of every row. Default: nodes on a CPU, paths on a GPU, where they are faster.",
        "nodes|paths",
        has_flag=False,
    )
    numerics: str = setting(
        Numerics.FASTEST.value,
        OneOf(tuple(Numerics)),
        "Order of sums on GPUs. invariant: one order, so that an answer does not depend on what is computed beside "
        "it, and exact decoding gives the target's answer bit for bit; fastest: the order that is fastest for the "
        "number of tokens, so that near ties may fall differently.",
        "ORDER",
    )
    potentials: tuple[tuple[str, str], ...] = setting(
        (),
        lambda _, value: _pairs(value),
        "Potentials that requests may name: a mapping from names to callables, each given as module:function. "
        "Default: none.",
        has_flag=False,
    )
    potential_timeout: float = setting(
        10.0,
        above_zero(MAX_POTENTIAL_TIMEOUT),
        "Maximum seconds of one call of a potential; then its request fails.",
        has_flag=False,
    )
    max_queue: int | None = setting(
        None,
        at_least(1),
        f"Maximum number of waiting requests; further ones are refused. Default: {MAX_QUEUE}.",
        "COUNT",
    )
    """In the library: no limit."""
    max_queue_pages: int | None = setting(
        None,
        at_least(1),
        "Maximum number of KV pages of both pools that waiting requests may need together. Default: no limit.",
        has_flag=False,
    )
    defensive_share: float = 0.05
    """Share of the untruncated distribution in the proposal of a truncated request (smc/distributions.py)."""

    def __post_init__(self) -> None:
        if self.form == "lockstep" and self.branches not in (None, 1):
            raise ValueError(f"branches={self.branches} has no effect with form='lockstep'; leave it out")
        if self.redrafting == "always" and (self.form == "lockstep" or self.block == 1):
            raise ValueError(
                f"redrafting='always' has no effect with form={self.form!r} and block={self.block}; leave it out"
            )
        if self.smc_block is not None and self.smc_block > self.block:
            raise ValueError(f"smc_block={self.smc_block}; allowed: 1..{self.block} (block)")
        if self.branches is None:
            object.__setattr__(self, "branches", 4 if self.form == "lookahead" else 1)
        check_settings(self)
        if not 0 < self.defensive_share < 1:
            raise ValueError(f"defensive_share={self.defensive_share!r}; allowed: between 0 and 1, both excluded")

    def on_device(self, device: str) -> EngineConfig:
        """Return the configuration with `verified` set, if it is not yet, for models on this device."""
        return replace(self, verified=self.verified or (PATHS if device == "cuda" else NODES))

    def check_numerics(self, device: str, dtype: str | None) -> None:
        """Raise ValueError if `numerics` has no effect for models on this device, or of this type if it is given."""
        if self.numerics == Numerics.INVARIANT:
            for name, value, without in (("device", device, "cpu"), ("dtype", dtype, "float32")):
                if value == without:
                    raise ValueError(f"numerics='invariant' has no effect with {name}={value!r}; leave it out")

    def pool_pages(self, context: int, room: int | None = None) -> int:
        """Return `pages`, or the default for this context. `room`: pages that a GPU has memory for, None on a CPU.
        Raises ValueError if memory is too small for one request."""
        least = self.least_pages(context)
        if self.pages or room is None:
            return self.pages or max(512 * self.max_slots, least)
        if room < least:
            raise ValueError(
                f"max_context={context} needs {least} KV pages, and there is memory for {room}; "
                "allowed: a shorter max_context, or more GPUs to a model"
            )
        return min(room, 2 * self.max_slots * least, MOST_PAGES)

    def least_pages(self, context: int) -> int:
        """Pages with which one request of the longest context fits into a pool, if it has one row."""
        return context + 2 * (self.begin_tokens + self.branches * self.block)

    def first_lengths(self, context: int) -> tuple[int, int]:
        """Return the tokens of the prompt and of the answer of the short request with which an engine begins."""
        prompt = min(4, context - 1)
        return prompt, min(2 * self.block + 2, context - prompt)

    def check_pages(self, context: int) -> None:
        """Raise ValueError if `pages` is given and is too small for an engine's first request."""
        least = self.least_pages(sum(self.first_lengths(context)))
        if self.pages is not None and self.pages < least:
            raise ValueError(f"pages={self.pages}; allowed: at least {least}, what a short request may need")

    @property
    def branch_levels(self) -> tuple[int, ...]:
        """Values of F from which the latency model chooses for rounds of exact decoding, largest first: all branches,
        and smaller powers of two."""
        return (self.branches, *(1 << power for power in reversed(range((self.branches - 1).bit_length()))))

    @property
    def fixed_block(self) -> int:
        """K of requests whose answers depend on it."""
        return min(SMC_BLOCK, self.block) if self.smc_block is None else self.smc_block

    @property
    def block_levels(self) -> tuple[int, ...]:
        """Numbers of drafted tokens from which the latency model chooses for rounds of exact decoding, largest first:
        K, and those of `BLOCK_LEVELS` below and `fixed_block`; in look-ahead not one, because one token is no more
        than a miss brings."""
        least, levels = 2 if self.lookahead else 1, sorted({*BLOCK_LEVELS, self.fixed_block}, reverse=True)
        return (self.block, *(level for level in levels if least <= level < self.block))

    def level_of(self, tokens: int) -> int:
        """Return the smallest of `block_levels` that is at least this number of tokens."""
        return min(level for level in self.block_levels if level >= tokens)

    @property
    def redrafted(self) -> int:
        """R: number of tokens that a round drafts again after a miss where the latency model does not choose it; 0:
        none."""
        return self.block - 1 if self.redrafting == "always" else 0

    @property
    def redraft_levels(self) -> tuple[int, ...]:
        """Values of R that rounds may have, largest first, without 0: the rest of a block, whose first token is known,
        and half of it."""
        if self.redrafting == "always":
            return (self.redrafted,)
        is_chosen = self.lookahead and self.redrafting == self.drafting == "adaptive"
        return tuple(level for level in (self.block - 1, (self.block - 1) // 2) if level and is_chosen)

    @property
    def draft_sizes(self) -> tuple[tuple[int, int, int], ...]:
        """Tuples (steps, branches, redrafted): how much rounds of exact decoding may draft where the latency model
        chooses it. The first is the whole block on all branches; each of the others differs from it in one number,
        because rounds of each are compiled and recorded by themselves, before the first request."""
        whole = self.block, self.branches, self.redrafted
        return (
            whole,
            *((self.block, branches, self.redrafted) for branches in self.branch_levels[1:]),
            *((steps, self.branches, self.redrafted) for steps in self.block_levels[1:]),
            *((self.block, self.branches, again) for again in self.redraft_levels if again != self.redrafted),
        )

    def chains(self, vocab: int) -> int:
        """Return `max_chains`, or its default for a vocabulary of this size."""
        most = self.max_chains
        if most is None:
            most = DISTRIBUTION_BYTES // (
                FLOAT_BYTES * vocab * max(map(self.distributions, (ModelRole.DRAFT, ModelRole.TARGET)))
            )
        return min(most, self.max_slots)

    def distributions(self, role: ModelRole) -> int:
        """Number of distributions over the vocabulary that a model stores for a draft chain. At the target: those that
        the chain's tokens were drawn from, and its own after each token. At the draft: those of the drafted tokens, in
        look-ahead of F rows, plus twice those of the chain in flight."""
        drawn = self.target_tokens - 1
        if role == ModelRole.TARGET:
            return drawn + self.target_tokens
        return drawn * (self.branches + 2) if self.lookahead else drawn

    def distribution_bytes(self, role: ModelRole, vocab: int) -> int:
        """Return the bytes for the distributions of all chains at a model."""
        return self.chains(vocab) * self.distributions(role) * vocab * FLOAT_BYTES

    def logit_bytes(self, role: ModelRole, vocab: int) -> int:
        """Return the bytes of a model's logits, and of what is made of them, in a round of all slots with penalties."""
        tokens = self.target_tokens if role is ModelRole.TARGET else self.branches
        return self.max_slots * tokens * vocab * LOGIT_BYTES[role]

    def width(self, context: int) -> int:
        """Positions of a block table: a block may extend past the longest answer, which keeps shapes static."""
        return context + self.block + 2

    @property
    def target_tokens(self) -> int:
        """Maximum tokens of a sequence that the target runs in a round: a block, and in lockstep also the seed."""
        return self.block if self.lookahead else self.block + 1

    def scored(self, steps: Any) -> Any:
        """Return the tokens of a block that the target runs, if `steps` tokens are drafted for it: an integer, or an
        array."""
        return steps if self.lookahead else steps + 1

    @property
    def begin_tokens(self) -> int:
        """Maximum tokens of a sequence that the draft has not run when a round begins: in lockstep the last drafted
        token and the bonus token."""
        return 1 if self.lookahead else 2

    @property
    def max_stops(self) -> int:
        """Entries of the stop tables: one for each set of stop conditions that run in parallel, and one for none."""
        return min(self.max_slots, MAX_STOPS) + 1

    def context(self, longest: int) -> int:
        """Return `max_context`, or the context that the models were made for. Raises ValueError if it exceeds that."""
        context = self.max_context or longest
        if context > longest:
            raise ValueError(f"max_context={context}; allowed: 2..{longest}, what both models were made for")
        return context

    @property
    def lookahead(self) -> bool:
        return self.form == "lookahead"
