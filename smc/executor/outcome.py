"""What the two models tell each other in a round, and the host of it. NumPy on the host's side, tensors on the models'.

See the package's legend for axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from smc.types import Array


@dataclass(frozen=True)
class Drafted:
    """What the draft sends the target: rows of K tokens, F for every place, each group's in the order of the places they come from."""

    all_WX: Tensor
    """int32, in one piece, as it travels: tokens, the bits of their log q, root, count, whether ended, the bits of the share."""

    @staticmethod
    def width(block: int) -> int:
        """W: numbers of a row of so many tokens."""
        return 2 * block + 4

    @staticmethod
    def of(tokens_XK: Tensor, logq_XK: Tensor, root_X: Tensor, count_X: Tensor, ended_X: Tensor, share_X: Tensor) -> Drafted:
        share_1X = share_X.float().view(torch.int32)[None]
        numbers_3X = torch.stack((root_X.int(), count_X.int(), ended_X.int()))
        return Drafted(torch.cat((tokens_XK.t().int(), logq_XK.t().contiguous().view(torch.int32), numbers_3X, share_1X)))

    @property
    def block(self) -> int:
        """K."""
        return (len(self.all_WX) - 4) // 2

    @property
    def tokens_XK(self) -> Tensor:
        """int32."""
        return self.all_WX[: self.block].t()

    @property
    def logq_XK(self) -> Tensor:
        """float32."""
        return self.all_WX[self.block : -4].view(torch.float32).t()

    @property
    def root_X(self) -> Tensor:
        """int32 place whose particle a row continues."""
        return self.all_WX[-4]

    @property
    def count_X(self) -> Tensor:
        """int64: how many tokens exist; 0 where the particle had ended."""
        return self.all_WX[-3].long()

    @property
    def ended_X(self) -> Tensor:
        """bool: the last token is terminal."""
        return self.all_WX[-2] > 0

    @property
    def share_X(self) -> Tensor:
        """float64 log of the row's mass over its root's, without what its tokens' log q are weighed with; -inf where there is no row."""
        return self.all_WX[-1].view(torch.float32).double()


@dataclass(frozen=True)
class Choice:
    """What the target sends the draft: how each place goes on. By place after the choice."""

    all_9A: Tensor
    """int64, in one piece, as it travels."""

    @staticmethod
    def of(
        ancestor_A: Tensor,
        row_A: Tensor,
        count_A: Tensor,
        cut_A: Tensor,
        bonus_A: Tensor,
        alive_A: Tensor,
        ended_A: Tensor,
        text_A: Tensor,
        mass_A: Tensor,
    ) -> Choice:
        """`bonus`: a token, or -1 where none is appended."""
        mass_A = mass_A.double().view(torch.int64)
        return Choice(
            torch.stack((ancestor_A, row_A, count_A, cut_A, bonus_A.long(), alive_A.long(), ended_A.long(), text_A.long(), mass_A))
        )

    @property
    def ancestor_A(self) -> Tensor:
        """Place whose particle goes on here."""
        return self.all_9A[0]

    @property
    def row_A(self) -> Tensor:
        """Which drafted row it goes on with."""
        return self.all_9A[1]

    @property
    def count_A(self) -> Tensor:
        """How many tokens of that row it takes."""
        return self.all_9A[2]

    @property
    def cut_A(self) -> Tensor:
        """How many of the ancestor's last tokens are taken back first."""
        return self.all_9A[3]

    @property
    def bonus_A(self) -> Tensor:
        """Token of the target's own that is appended last; -1: none."""
        return self.all_9A[4]

    @property
    def alive_A(self) -> Tensor:
        """bool: the place holds a particle."""
        return self.all_9A[5] > 0

    @property
    def ended_A(self) -> Tensor:
        """bool: it runs nothing any more, or holds nothing."""
        return self.all_9A[6] > 0

    @property
    def text_A(self) -> Tensor:
        """State of the stop machine before the row's tokens (look-ahead) or before the bonus token."""
        return self.all_9A[7]

    @property
    def mass_A(self) -> Tensor:
        """float64 log mass."""
        return self.all_9A[8].view(torch.float64)


@dataclass(frozen=True)
class Lineage(Generic[Array]):
    """Pages that particles have more or less than their ancestors had, by place after the choice. Tensors where the model is."""

    path_AW: Array
    """int32."""
    kept_A: Array
    """int32: how many of them hold keys and values of the particle's tokens."""
    dropped_A: Array
    """int32: how many of the ancestor's last pages are given up."""


@dataclass(frozen=True)
class RoundResult(Generic[Array]):
    """What the host learns of a round. By place, after the choice, unless said otherwise. Tensors where the model is."""

    ancestor_A: Array
    """Place."""
    alive_A: Array
    """bool: the place holds a particle. One that does not repeats another of its group, and has ended."""
    cut_A: Array
    """How many of the ancestor's last tokens were taken back."""
    grown_AQ: Array
    """Tokens that came after those."""
    count_A: Array
    """How many of them exist."""
    ended_A: Array
    logw_A: Array
    """float64."""
    logq_AQ: Array
    """float32 log q of the tokens that came."""
    logp_AQ: Array
    """float32 log p of the tokens after the first of the block that was scored, as far as they stay; NaN beyond."""
    first_logp_A: Array
    """float32 log p of the token that follows the scored block; NaN where none does."""
    log_z_G: Array
    ess_G: Array
    resampled_G: Array
    collapsed_G: Array
    draft_nan_G: Array
    """bool: the draft returned NaN among tokens that exist."""
    target_nan_G: Array
    hit_G: Array
    """bool: what was drafted ahead was right (exact decoding)."""
    lineage: Lineage[Array]
    """At the target, or the model that decodes alone."""
