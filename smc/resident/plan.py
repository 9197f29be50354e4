"""What the host and the two models tell each other about a round. NumPy on the host's side, tensors on the models'."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from smc.engine.matcher import StopMatcher
from smc.laws import LawSpec

ALIGNMENT = 16
SHORT = 640
"""Positions up to which rows are cheaper to attend one by one."""
IN_FLIGHT = 9
"""Rounds of one shape whose memory must not be used again yet: two for each of at most four cohorts, and the next."""


@dataclass(frozen=True)
class Start:
    """A group whose prompt its models have run, as the host tells it: its particles have their first token and nothing more."""

    slots_N: np.ndarray
    """int32."""
    prompt_row: int
    """Row of the workers' tables that holds the prompt."""
    prompt_size: int
    max_tokens: int
    first_N: np.ndarray
    """int32 first token of every particle."""
    ended_N: np.ndarray
    """bool: the first token was the last."""
    logw_N: np.ndarray
    """float64."""
    stop_ids: list[int]
    """Tokens that end the answer."""
    matcher: StopMatcher | None
    """Of the strings that end it."""
    text_N: np.ndarray
    """int64 state of the matcher after the first token."""


@dataclass(frozen=True)
class Joining:
    """A group that starts on one side, with its pages there."""

    start: Start
    pages_NL: np.ndarray
    """int32 [N, prompt + answer + a block]: page of every position; the prompt's are the same in each row."""
    spare_NFB: np.ndarray
    """int32 [N, F - 1, K - 1]: pages for the branches besides the first (the draft's; empty at the target)."""


@dataclass(frozen=True)
class RoundPlan:
    """One round of G groups: everything about it that does not depend on what a model says. Arrays, or tensors where the model is."""

    schemes: tuple[str | None, ...]
    """Per group; None where nothing is resampled because a model decodes alone."""
    short: bool
    """No row holds more than `SHORT` positions when the round ends."""
    matching: bool
    """A group has stop strings."""
    target_law: LawSpec
    """Per place."""
    draft_law: LawSpec
    slots_A: np.ndarray | Tensor
    """int64; the dummy slot (number `slots`) where a group has fewer particles."""
    particle_A: np.ndarray | Tensor
    """int64 number of the particle in its group."""
    seed_A: np.ndarray | Tensor
    """int64."""
    round_A: np.ndarray | Tensor
    """int64, from 1."""
    position_A: np.ndarray | Tensor
    """int64 position of the last answer token of open particles."""
    room_A: np.ndarray | Tensor
    """int64 tokens by which an answer may still grow."""
    alpha_A: np.ndarray | Tensor
    """float64."""
    size_G: np.ndarray | Tensor
    """int64 particles."""
    shared_G: np.ndarray | Tensor
    """int32 leading positions at which all particles of a group have the same tokens, on both sides."""
    threshold_G: np.ndarray | Tensor
    """float64 share of N below which the effective sample size leads to resampling."""
    uniforms_GU: np.ndarray | Tensor
    """float64, for resampling."""
    branch_uniforms_GM: np.ndarray | Tensor
    """float64, for picking branches."""

    @property
    def shape_GM(self) -> tuple[int, int]:
        return tuple(self.branch_uniforms_GM.shape)

    @property
    def owner_A(self) -> Tensor:
        """The first slot of each place's group."""
        return self.slots_A.view(self.shape_GM)[:, :1].expand(self.shape_GM).flatten()

    @property
    def key(self) -> tuple:
        """Rounds of the same key run the same operations on the same shapes."""
        laws = (self.target_law.active, self.draft_law.active)
        return (
            self.short,
            self.matching,
            *self.shape_GM,
            self.uniforms_GU.shape[1],
            self.schemes if len(set(self.schemes)) > 1 else self.schemes[:1],
            *laws,
        )

    @property
    def recordable(self) -> bool:
        """Whether the operations can be recorded once and replayed: nothing among them asks the host."""
        return len(set(self.schemes)) == 1 and "ssp" not in self.schemes

    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays, by name."""
        own = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        laws = {f"{side}.{name}": value for side in ("target_law", "draft_law") for name, value in vars(getattr(self, side)).items()}
        return own | {name: value for name, value in laws.items() if isinstance(value, np.ndarray)}

    def with_arrays(self, tensors: dict[str, Tensor]) -> RoundPlan:
        """The same plan over tensors of the same names."""
        laws = {}
        for side in ("target_law", "draft_law"):
            mine = {name.split(".")[1]: tensor for name, tensor in tensors.items() if name.startswith(side)}
            laws[side] = LawSpec(**mine, active=getattr(self, side).active)
        own = {name: tensor for name, tensor in tensors.items() if "." not in name}
        return RoundPlan(schemes=self.schemes, short=self.short, matching=self.matching, **laws, **own)


class PlanBuffer:
    """A plan's arrays in one piece of memory, so that one copy brings them to a device; for plans of one key."""

    def __init__(self, plan: RoundPlan, device: torch.device) -> None:
        arrays, offset, self._places = plan.arrays(), 0, {}
        for name, array in arrays.items():
            self._places[name] = (offset, array.nbytes)
            offset += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        # In turn: the next plan is written while those before it are still on their way.
        pinned = device.type == "cuda"
        self._hosts = [torch.zeros(offset, dtype=torch.uint8, pin_memory=pinned) for _ in range(IN_FLIGHT if pinned else 1)]
        self._turn = 0
        self._there = torch.zeros(offset, dtype=torch.uint8, device=device)
        self.plan = plan.with_arrays({name: self._view(self._there, name, array) for name, array in arrays.items()})
        """Over the device's memory: always the same tensors."""

    def load(self, plan: RoundPlan) -> RoundPlan:
        """Bring another plan of the same key to the device."""
        host = self._hosts[self._turn]
        self._turn = (self._turn + 1) % len(self._hosts)
        for name, array in plan.arrays().items():
            self._view(host, name, array).numpy()[...] = array
        self._there.copy_(host, non_blocking=True)
        return self.plan

    def _view(self, memory: Tensor, name: str, like: np.ndarray) -> Tensor:
        begin, size = self._places[name]
        return memory[begin : begin + size].view(torch.from_numpy(like[:0]).dtype).view(like.shape)


@dataclass(frozen=True)
class Drafted:
    """What the draft sends the target: the first tokens (K = 1), later all."""

    all_2KAF: Tensor
    """int32, in one piece, as it travels: tokens, and the bits of their log q."""

    @staticmethod
    def of(tokens: list[Tensor], logq: list[Tensor]) -> Drafted:
        """Of integer tokens and their float32 log q, step by step, [A, F] each."""
        pieces = [token_AF.int() for token_AF in tokens] + [logq_AF.view(torch.int32) for logq_AF in logq]
        return Drafted(torch.stack(pieces).unflatten(0, (2, -1)))

    @property
    def tokens_AFK(self) -> Tensor:
        """int32."""
        return self.all_2KAF[0].permute(1, 2, 0)

    @property
    def logq_AFK(self) -> Tensor:
        """float32."""
        return self.all_2KAF[1].view(torch.float32).permute(1, 2, 0)


@dataclass(frozen=True)
class Choice:
    """What the target sends the draft: which particle and branch goes on in each place, and how it goes on."""

    all_3A: Tensor
    """int64, in one piece, as it travels."""

    @property
    def ancestor_A(self) -> Tensor:
        """Place."""
        return self.all_3A[0]

    @property
    def branch_A(self) -> Tensor:
        return self.all_3A[1]

    @property
    def bonus_A(self) -> Tensor:
        """Token (lockstep), by place before the choice."""
        return self.all_3A[2]


@dataclass(frozen=True)
class RoundResult:
    """What the host learns of a round. By place, after the choice, unless said otherwise. Tensors where the model is."""

    ancestor_A: np.ndarray | Tensor
    grown_AQ: np.ndarray | Tensor
    """Tokens that came after those of the ancestor."""
    count_A: np.ndarray | Tensor
    """How many of them exist."""
    ended_A: np.ndarray | Tensor
    logw_A: np.ndarray | Tensor
    """float64."""
    logp_AQ: np.ndarray | Tensor
    """float32, by place before the choice: log p of the tokens after the first of the block that was scored."""
    first_logp_A: np.ndarray | Tensor
    """float32 log p of the token that follows the scored block; NaN where none does."""
    log_z_G: np.ndarray | Tensor
    ess_G: np.ndarray | Tensor
    resampled_G: np.ndarray | Tensor
    collapsed_G: np.ndarray | Tensor
    draft_nan_G: np.ndarray | Tensor
    """bool: the draft returned NaN among tokens that exist."""
    target_nan_G: np.ndarray | Tensor
