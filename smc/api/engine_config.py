"""Settings of an engine, for all of its requests. Checked when built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

from smc.api.limits import UNSET
from smc.api.sampling_params import is_potential
from smc.types import ModelRole

MAX_BLOCK = 32
MAX_BRANCHES = 32
MOST_PAGES = 1 << 23
"""Most pages of a pool: the scheduler keeps a few bytes for each."""
MAX_STOPS = 64
"""Different sets of stop tokens and strings among requests that run in parallel."""
FLOAT_BYTES = 4
MAX_PREFILL_SHARE = 100.0
"""Largest factor by which prompts may lengthen rounds."""
DISTRIBUTION_BYTES = 1 << 30
"""Memory of a model's device for the token distributions of draft chains, where `max_chains` is not set."""
MAX_POTENTIAL_TIMEOUT = 3600.0
"""Seconds."""


def _pairs(potentials: Mapping[str, str] | tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Raises ValueError."""
    pairs = tuple(potentials.items() if isinstance(potentials, Mapping) else potentials)
    for name, path in pairs:
        if not is_potential(name) or not isinstance(path, str) or not all(path.partition(":")[::2]):
            raise ValueError(f"potentials has {name!r}: {path!r}; allowed: a name, and module:function")
    return pairs


class PrefillSettings(TypedDict):
    """Fields of `EngineConfig`."""

    prefill_chunk: int
    prefill_share: float


GPU_PREFILL: PrefillSettings = {"prefill_chunk": 4096, "prefill_share": 0.4}
"""Defaults for models on GPUs: large matrix products, and rounds that prompts lengthen by less than half."""


@dataclass(frozen=True)
class EngineConfig:
    """Raises ValueError naming the field, the value and what is allowed."""

    form: str = "lookahead"
    """`lockstep`: draft, then score. `lookahead`: draft every outcome of the next block while the target scores this
    one."""
    block: int = 8
    """K, 1..32: tokens the draft draws per round."""
    branches: int = UNSET
    """F, 1..32: branches of the next block per particle. Look-ahead only; default 4."""
    cohorts: int = 1
    """Sets of requests whose rounds alternate, 1..4. More than one pays in lockstep, where models run in processes of
    their own."""
    max_slots: int = 64
    """Particles of all running requests together."""
    max_context: int | None = None
    """Longest prompt plus answer, in tokens; default: what the models were made for."""
    pages: int | None = None
    """Token positions in the KV pool of each model; default: on GPUs as many as there is memory for, up to the longest
    context in every slot and as much again for the prefix cache; on a CPU 512 a slot, and at least one request of the
    longest context."""
    prefill_chunk: int = 128
    """Prompt tokens run per step and model at most, so that a long prompt does not stop the others."""
    prefill_share: float | None = None
    """Most time that prompts take beside rounds, in the mean, as a share of what the rounds take; default: what
    `prefill_chunk` takes."""
    max_queue: int | None = None
    """Requests that may wait for slots and pages; default: any number."""
    max_queue_pages: int | None = None
    """KV pages, of both pools together, that waiting requests may ask for; default: any number."""
    prefix_cache: bool = True
    """Keep what has been computed for prompts and answers, for prompts that begin alike."""
    drafting: str = "costs"
    """What is drafted for exact decoding, whose answers do not depend on it. `costs`: as much as pays, down to nothing,
    where a service has timed its models; `always`: trees as large as requests ask for."""
    max_chains: int | None = None
    """Chains of all running requests together that are decoded by rejection (smc/executor/verify.py): each takes memory
    for token distributions over the whole vocabulary, which is set aside. 0: no such requests. Default: as many as take
    1 GiB at either model; never more than slots."""
    defensive_share: float = 0.05
    """Share of the untruncated distribution in the proposal of a truncated request (smc/distributions.py)."""

    potentials: tuple[tuple[str, str], ...] = ()
    """Callables that requests may name as their `potential`: name and module:function of each. A mapping is taken,
    too."""
    potential_timeout: float = 10.0
    """Seconds that a potential may take each time that it is asked about a request."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "potentials", _pairs(self.potentials))
        if not 0 < self.potential_timeout <= MAX_POTENTIAL_TIMEOUT:
            raise ValueError(
                f"potential_timeout={self.potential_timeout!r}; allowed: above 0, at most {MAX_POTENTIAL_TIMEOUT:g}"
            )
        if self.form not in ("lockstep", "lookahead"):
            raise ValueError(f"form={self.form!r}; allowed: lockstep, lookahead")
        if self.drafting not in ("costs", "always"):
            raise ValueError(f"drafting={self.drafting!r}; allowed: costs, always")
        if self.form == "lockstep" and self.branches not in (None, 1):
            raise ValueError(f"branches={self.branches} has no effect with form='lockstep'; leave it out")
        if self.branches is None:
            object.__setattr__(self, "branches", 4 if self.form == "lookahead" else 1)
        for name, low, high in (
            ("block", 1, MAX_BLOCK),
            ("branches", 1, MAX_BRANCHES),
            ("cohorts", 1, 4),
            ("max_slots", 1, 65536),
            ("prefill_chunk", 1, 1 << 20),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or not low <= value <= high:
                raise ValueError(f"{name}={value!r}; allowed: {low}..{high}")
        for name, low in (
            ("max_context", 2),
            ("pages", 2),
            ("max_queue", 1),
            ("max_queue_pages", 1),
            ("max_chains", 0),
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < low):
                raise ValueError(f"{name}={value!r}; allowed: >= {low}")
        if self.prefill_share is not None and not 0 < self.prefill_share <= MAX_PREFILL_SHARE:
            raise ValueError(f"prefill_share={self.prefill_share!r}; allowed: above 0, at most {MAX_PREFILL_SHARE}")
        if not 0 < self.defensive_share < 1:
            raise ValueError(f"defensive_share={self.defensive_share!r}; allowed: between 0 and 1, both excluded")

    def pool_pages(self, context: int, room: int | None = None) -> int:
        """`pages`, or the default for this context; `room`: pages that a GPU has memory for. Raises ValueError if that
        is too little."""
        least = context + 2 * (self.begin_tokens + self.branches * self.block)
        if self.pages or room is None:
            return self.pages or max(512 * self.max_slots, least)
        if room < least:
            raise ValueError(
                f"max_context={context} needs {least} KV pages, and there is memory for {room}; "
                "allowed: a shorter max_context, or more GPUs to a model"
            )
        return min(room, 2 * self.max_slots * least, MOST_PAGES)

    @property
    def branch_levels(self) -> tuple[int, ...]:
        """Values of F that rounds of exact decoding have where costs decide, largest first: all branches, the powers of
        four below, and one."""
        fewer = (4**power for power in range(3) if 4**power < self.branches)
        return (self.branches, *sorted(fewer, reverse=True))

    @property
    def block_levels(self) -> tuple[int, ...]:
        """Numbers of tokens that rounds of exact decoding draft where costs decide, largest first: in lockstep K, its
        half rounded up, the half of that, down to one. In look-ahead always K: the draft works while the target does."""
        levels = [self.block]
        while levels[-1] > 1 and not self.lookahead:
            levels.append(-(-levels[-1] // 2))
        return tuple(levels)

    def chains(self, vocab: int) -> int:
        """`max_chains`, or its default for a vocabulary of so many tokens."""
        most = self.max_chains
        if most is None:
            most = DISTRIBUTION_BYTES // (
                FLOAT_BYTES * vocab * max(map(self.distributions, (ModelRole.DRAFT, ModelRole.TARGET)))
            )
        return min(most, self.max_slots)

    def distributions(self, role: ModelRole) -> int:
        """Distributions over the vocabulary that a model stores for a draft chain. At the target: those that the
        chain's tokens were drawn from, and its own after each token. At the draft: those of the drafted tokens; in
        look-ahead of F rows, and twice those of the chain in flight."""
        drawn = self.target_tokens - 1
        if role == ModelRole.TARGET:
            return drawn + self.target_tokens
        return drawn * (self.branches + 2) if self.lookahead else drawn

    def distribution_bytes(self, role: ModelRole, vocab: int) -> int:
        """Memory for the distributions of all chains."""
        return self.chains(vocab) * self.distributions(role) * vocab * FLOAT_BYTES

    def width(self, context: int) -> int:
        """Positions of a block table: a block may run past the longest answer, for the sake of a static shape."""
        return context + self.block + 2

    @property
    def target_tokens(self) -> int:
        """Tokens that the target runs in a round, at most: a block, and in lockstep the seed."""
        return self.block if self.lookahead else self.block + 1

    @property
    def begin_tokens(self) -> int:
        """Tokens that the draft has not run when a round begins, at most: in lockstep its last one and the bonus."""
        return 1 if self.lookahead else 2

    @property
    def max_stops(self) -> int:
        """Entries of the stop tables: different ends of answers that run in parallel, and one for none."""
        return min(self.max_slots, MAX_STOPS) + 1

    def context(self, longest: int) -> int:
        """`max_context`, or all that the models were made for. Raises ValueError if it exceeds that."""
        context = self.max_context or longest
        if context > longest:
            raise ValueError(f"max_context={context}; allowed: 2..{longest}, what both models were made for")
        return context

    @property
    def lookahead(self) -> bool:
        return self.form == "lookahead"
