"""The likeliest tokens at positions of a sequence, under the law of what comes there, which is that of rounds. Plain torch on every device:
they are asked for once an answer.

Axes: R rows, Y tokens that are asked about (row after row), X those and, after them, their companions', S a slice of Y, E hidden size,
V vocabulary, K tops.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from smc.arrays import to_device
from smc.executor.biases import BiasTables, add_biases, width_of
from smc.executor.messages import Tops
from smc.executor.sampling import Sampling

SLICE = 32
"""Tokens whose laws exist at the same time: whole vocabularies of more would take memory that nobody has set aside."""


def last_tokens(counts_R: np.ndarray, asked_R: np.ndarray) -> np.ndarray:
    """Index [X] of the last `asked` of every row's `count` tokens, which stand row after row."""
    end_X = np.repeat(np.cumsum(counts_R), asked_R)
    return end_X - np.repeat(asked_R, asked_R) + offsets(asked_R)


def offsets(count_R: np.ndarray) -> np.ndarray:
    """0, 1, .. within each row."""
    return np.arange(count_R.sum()) - np.repeat(np.cumsum(count_R) - count_R, count_R)


def likeliest(
    logits: Callable[[Tensor], Tensor], sampling: Sampling, tops: Tops, hidden_XE: Tensor, ends_R: np.ndarray
) -> tuple[Tensor, Tensor]:
    """Tokens int32 [Y, K] and their log p [Y, K]. `ends_R`: positions of every row after this pass."""
    device, rows = hidden_XE.device, len(tops.law.temperature_R)
    asked_R, ends_R = tops.asked_R[:rows], ends_R[:rows]
    row_Y = np.repeat(np.arange(rows), asked_R)
    next_Y = ends_R[row_Y] - asked_R[row_Y] + offsets(asked_R) + 1
    companion_Y = _companions(tops, row_Y, offsets(asked_R))
    tables = _tables(tops, sampling.vocab, device)
    width = max((width_of(machine) for machine in tops.machines if machine is not None), default=0)
    lives = (torch.arange(rows, device=device), to_device(tops.least_R, device))
    found = []
    for first in range(0, len(row_Y), SLICE):
        part = slice(first, first + SLICE)
        row_S = to_device(row_Y[part], device)
        logits_SV = logits(hidden_XE[first : first + len(row_S)])
        if companion_Y is not None and tops.scale_R is not None:
            theirs_SV = logits(hidden_XE[to_device(companion_Y[part], device)])
            own_S = torch.arange(len(row_S), device=device)
            logits_SV = sampling.guide(logits_SV, theirs_SV, own_S, to_device(tops.scale_R, device)[row_S])
        if tables is not None:
            logits_SV = add_biases(tables, lives, logits_SV, row_S, to_device(next_Y[part], device), width)
        law_SV = torch.empty(len(row_S), sampling.vocab, device=device)
        sampling.write_law(logits_SV, tops.law.take(row_Y[part]), law_SV)
        logp_SK, token_SK = law_SV.topk(min(tops.count, sampling.vocab), dim=-1)
        found.append((token_SK.int(), logp_SK))
    tokens, logps = zip(*found)
    return torch.cat(tokens), torch.cat(logps)


def _companions(tops: Tops, row_Y: np.ndarray, offset_Y: np.ndarray) -> np.ndarray | None:
    """Index [Y] of the token beside each, in the row that guides its row; itself where none does. None: nobody is guided."""
    if tops.companion_R is None:
        return None
    begin_R = np.cumsum(tops.asked_R) - tops.asked_R
    return begin_R[tops.companion_R[row_Y]] + offset_Y


def _tables(tops: Tops, vocab: int, device: torch.device) -> BiasTables | None:
    """What is added, a row of the batch an entry; None where nothing is."""
    if not any(tops.machines):
        return None
    tables = BiasTables(len(tops.machines), vocab, device)
    for row, machine in enumerate(tops.machines):
        if machine is not None:
            tables.set(row, machine)
    return tables
