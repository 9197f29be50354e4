"""What the places of a group have in common. See the package's legend for axes."""

from __future__ import annotations

import torch
from torch import Tensor

from smc.runtime.plan import RoundPlan


def any_of_group(mask_XR: Tensor, group_R: Tensor, plan: RoundPlan) -> Tensor:
    """Whether a mask holds anywhere in a group, bool [X, G]; `group_R` names the group of every entry."""
    counts_XG = torch.zeros(len(mask_XR), len(plan.first_G), device=mask_XR.device)
    return counts_XG.index_add(1, group_R, mask_XR.float()) > 0
