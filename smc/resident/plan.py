"""What the host and the two models tell each other about a round. NumPy on the host's side, tensors on the models'."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from smc.laws import LawSpec


@dataclass(frozen=True)
class Joining:
    """One group that starts: its particles have their first token and have run nothing but the prompt."""

    slots_N: np.ndarray
    """int32."""
    pages_NL: np.ndarray
    """int32 [N, prompt + answer + a block]: page of every position; the prompt's are the same in each row."""
    spare_NFB: np.ndarray
    """int32 [N, F - 1, K - 1]: pages for the branches besides the first (the draft's; empty at the target)."""
    prompt_size: int
    first_N: np.ndarray
    """int32 first token of every particle."""
    ended_N: np.ndarray
    """bool: the first token was the last."""
    logw_N: np.ndarray
    """float64."""
    stop_ids: list[int]
    """Tokens that end the answer."""


@dataclass(frozen=True)
class RoundPlan:
    """One round of G groups: everything about it that does not depend on what a model says."""

    slots_GM: np.ndarray
    """int32; the dummy slot (number `slots`) where a group has fewer particles."""
    size_G: np.ndarray
    """int64 particles."""
    seed_G: np.ndarray
    """int64."""
    round_G: np.ndarray
    """int64, from 1."""
    position_G: np.ndarray
    """int64 position of the last answer token of every open particle."""
    room_G: np.ndarray
    """int64 tokens by which an answer may still grow."""
    shared_G: dict[str, np.ndarray]
    """int64, by side: leading positions at which all particles have the same tokens."""
    threshold_G: np.ndarray
    """float64 share of N below which the effective sample size leads to resampling."""
    alpha_G: np.ndarray
    """float64."""
    target_law: LawSpec
    """Per group."""
    draft_law: LawSpec
    schemes: list[str]
    uniforms_GU: np.ndarray
    """float64, for resampling."""
    branch_uniforms_GM: np.ndarray
    """float64, for picking branches."""

    @property
    def shape_GM(self) -> tuple[int, int]:
        return self.slots_GM.shape


@dataclass(frozen=True)
class Drafted:
    """What the draft sends the target."""

    tokens_AFK: Tensor
    """int64."""
    logq_AFK: Tensor
    """float32."""


@dataclass(frozen=True)
class Choice:
    """What the target sends the draft: which particle and branch goes on in each place, and how it goes on."""

    ancestor_A: Tensor
    """int64 place."""
    branch_A: Tensor
    """int64."""
    bonus_A: Tensor
    """int64 token (lockstep)."""


@dataclass(frozen=True)
class RoundResult:
    """What the host learns of a round. By place, after the choice, unless said otherwise."""

    ancestor_A: np.ndarray
    grown_AQ: np.ndarray
    """Tokens that came after those of the ancestor."""
    count_A: np.ndarray
    """How many of them exist."""
    ended_A: np.ndarray
    logw_A: np.ndarray
    """float64."""
    logp_AQ: np.ndarray
    """float32, by place before the choice: log p of the tokens after the first of the block that was scored."""
    first_logp_A: np.ndarray
    """float32 log p of the token that follows the scored block; NaN where none does."""
    log_z_G: np.ndarray
    ess_G: np.ndarray
    resampled_G: np.ndarray
    collapsed_G: np.ndarray
    draft_nan_G: np.ndarray
    """bool: the draft returned NaN among tokens that exist."""
    target_nan_G: np.ndarray
