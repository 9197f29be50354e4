"""Configuration of an engine, common to all of its requests. Checked when built."""

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
"""Maximum pages of a pool: the scheduler stores a few bytes for each."""
MAX_STOPS = 64
"""Maximum number of different sets of stop tokens and strings among requests that run in parallel."""
FLOAT_BYTES = 4
MAX_PREFILL_SHARE = 100.0
"""Maximum factor by which prompts may lengthen rounds."""
DISTRIBUTION_BYTES = 1 << 30
"""Memory on a model's device for the token distributions of draft chains, if `max_chains` is not set."""
MAX_POTENTIAL_TIMEOUT = 3600.0
"""Maximum of `potential_timeout`, in seconds."""


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


GPU_PREFILL: PrefillSettings = {"prefill_chunk": 4096, "prefill_share": 0.4}
"""Defaults for models on GPUs: large matrix products, and rounds that prompts lengthen by less than half."""


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine. Raises ValueError naming the field, the value and what is allowed."""

    form: str = "lookahead"
    """`lockstep`: draft, then score. `lookahead`: draft branches of the next block while the target scores the current
    one."""
    block: int = 8
    """K, 1..32: tokens that the draft proposes in a round."""
    branches: int = UNSET
    """F, 1..32: branches of the next block for each particle. Look-ahead only; default 4."""
    cohorts: int = 1
    """Number of micro-batches whose rounds alternate, 1..4. More than one pays in lockstep, if each model has processes
    of its own."""
    max_slots: int = 64
    """Slots of all running requests together: one for each particle or row, two if the request is guided."""
    max_context: int | None = None
    """Maximum tokens of prompt and answer together; default: the context that the models were made for."""
    pages: int | None = None
    """Token positions in the KV pool of each model. Default on GPUs: as many as memory allows, up to the longest
    context in every slot and the same again for the prefix cache. Default on a CPU: 512 for each slot, and at least one
    request of the longest context."""
    prefill_chunk: int = 128
    """Maximum prompt tokens that a model runs in one step, so that a long prompt does not block other requests."""
    prefill_share: float | None = None
    """Maximum average time spent on prompts beside rounds, as a share of the time of the rounds; default: only
    `prefill_chunk` limits it."""
    max_queue: int | None = None
    """Maximum number of requests that wait for slots and pages; default: unlimited."""
    max_queue_pages: int | None = None
    """Maximum KV pages, of both pools together, that waiting requests need; default: unlimited."""
    prefix_cache: bool = True
    """Keep the keys and values of prompts and answers, for later prompts that begin with the same tokens."""
    drafting: str = "costs"
    """How much is drafted in exact decoding; answers (verified by walk) do not depend on it. `costs`: as much as pays,
    possibly nothing, in a service that has timed its models; `always`: trees as large as requests ask for."""
    max_chains: int | None = None
    """Maximum number of chains of all running requests that are verified by rejection (smc/executor/verify.py). For
    each chain, memory for token distributions over the whole vocabulary is reserved. 0: such requests are refused.
    Default: as many as take 1 GiB at either model; never more than slots."""
    logprobs_mode: str = "raw"
    """Distribution of reported log-probabilities. `raw`: the softmax of the target's logits, as the model returns them;
    `processed`: the distribution that tokens are drawn from, after guidance, penalties, biases, constraints,
    temperature and truncation. Answers do not depend on it."""
    defensive_share: float = 0.05
    """Share of the untruncated distribution in the proposal of a truncated request (smc/distributions.py)."""

    potentials: tuple[tuple[str, str], ...] = ()
    """Callables that requests may name as their `potential`: pairs of a name and module:function. A mapping is
    accepted, too."""
    potential_timeout: float = 10.0
    """Maximum seconds of each call of a potential for a request."""

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
        if self.logprobs_mode not in ("raw", "processed"):
            raise ValueError(f"logprobs_mode={self.logprobs_mode!r}; allowed: raw, processed")
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
        """Return `pages`, or the default for this context. `room`: pages that a GPU has memory for, None on a CPU.
        Raises ValueError if memory is too small for one request."""
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
        """Values of F from which costs choose for rounds of exact decoding, largest first: all branches, smaller powers
        of four, and one."""
        fewer = (4**power for power in range(3) if 4**power < self.branches)
        return (self.branches, *sorted(fewer, reverse=True))

    @property
    def block_levels(self) -> tuple[int, ...]:
        """Numbers of drafted tokens from which costs choose for rounds of exact decoding, largest first. In lockstep K,
        then repeatedly half of the number before, rounded up, down to one. In look-ahead only K, because the draft
        works while the target does."""
        levels = [self.block]
        while levels[-1] > 1 and not self.lookahead:
            levels.append(-(-levels[-1] // 2))
        return tuple(levels)

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

    def width(self, context: int) -> int:
        """Positions of a block table: a block may extend past the longest answer, which keeps shapes static."""
        return context + self.block + 2

    @property
    def target_tokens(self) -> int:
        """Maximum tokens of a sequence that the target runs in a round: a block, and in lockstep also the seed."""
        return self.block if self.lookahead else self.block + 1

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
