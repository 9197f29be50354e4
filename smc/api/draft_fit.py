"""Whether a draft knows the text that it drafts for: rules about what requests have shown, and their words.

Knows numbers only, so that a probe of a pair and the answer to one request say the same."""

from __future__ import annotations

from smc.api.outputs import Statistics
from smc.api.sampling_params import Method, SamplingParams

LEAST_ACCEPTED = 0.25
"""Drafted tokens that a round of exact decoding confirms, below which the draft does not know the text."""
LEAST_EVIDENCE = -0.3
"""log Z-hat a token, below which a population is too small: a block of five tokens keeps e^-1.5, 22%, of the target's
probability."""
LEAST_ROUNDS, LEAST_TOKENS = 4, 8
"""Rounds of exact decoding with something drafted, and answer tokens of SMC, below which an answer says nothing."""
LEAST_GAIN = 1.05
"""Speed, as a multiple of plain decoding's, from which drafting pays."""


def of_acceptance(accepted: float) -> str | None:
    """Words about a draft of which so many tokens a round are accepted, with the trees of a request."""
    if accepted >= LEAST_ACCEPTED:
        return None
    return f"the draft does not know this text: {accepted:.2f} drafted tokens are accepted a round"


def of_evidence(log_z_per_token: float, particles: int) -> str | None:
    """Words about a population with this evidence."""
    if log_z_per_token >= LEAST_EVIDENCE:
        return None
    return (
        f"{particles} particles are too few for this draft and text: log Z is {log_z_per_token:.2f} a token, and below "
        f"{LEAST_EVIDENCE:g} the answers are the draft's rather than the target's"
    )


def of_answer(params: SamplingParams, statistics: Statistics, tokens: int) -> str | None:
    """Words about the draft of one answer, with what to do; None: nothing is to be said, or too little was seen."""
    method = params.method
    if method is Method.SMC and params.follows_target and statistics.rounds and tokens >= LEAST_TOKENS:
        words = of_evidence(statistics.log_z / tokens, statistics.particles)
        return words and f"{words}; use --method exact, or more particles"
    drafted = statistics.rounds - statistics.alone_rounds
    if method is Method.EXACT and statistics.accepted_per_round and drafted >= LEAST_ROUNDS:
        words = of_acceptance(statistics.accepted_per_round - 1)
        return words and f"{words}; --method target is as fast, and `smcserve check --probe` measures the pair"
    return None
