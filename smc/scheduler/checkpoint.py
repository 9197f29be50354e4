"""The record of a group's particles while they hold no slots: what it goes on from when it is taken up again, or
decoded in another way."""

from __future__ import annotations

import numpy as np
import torch

from smc.algorithm.bounds import Bounds
from smc.algorithm.expansion import Offers, expand
from smc.algorithm.selection import select
from smc.api.limits import SCHEME_NAMES
from smc.scheduler.sequence_group import SequenceGroup
from smc.scheduler.slots import Slots

SAVED = ("tokens_SL", "logp_SL", "logq_SL", "length_S", "block_S", "logw_S", "ended_S")
"""Arrays of `Slots` that a group's record is made of."""
SHRINK_ROUND = 1 << 30
"""Random numbers of choices between rounds are numbered from here: no round's are used twice."""


def record_of(group: SequenceGroup, slots: Slots) -> dict[str, np.ndarray]:
    """Of the particles that a running group has; of exact decoding, of what has been confirmed."""
    slots_N = group.living(slots)
    record = {name: getattr(slots, name)[slots_N].copy() for name in SAVED}
    if group.decoding.confirms:
        _take_back(record)
    return record


def particle_of(group: SequenceGroup, slots: Slots, particle: int, length: int) -> dict[str, np.ndarray]:
    """Of one particle alone, in slots or saved, and of so many of its tokens."""
    source = group.saved if group.saved else {name: getattr(slots, name)[group.slots] for name in SAVED}
    record = {name: source[name][particle : particle + 1].copy() for name in SAVED}
    record["length_S"][:], record["block_S"][:], record["ended_S"][:] = length, length - 1, True
    return record


def shrink_saved(group: SequenceGroup, particles: int) -> None:
    """A saved population becomes smaller, by the unbiased choice of a round, made here."""
    arrays = group.saved
    assert arrays is not None, "a group that is saved"
    if group.decoding.competes:
        _expand_saved(group, arrays, particles)
    else:
        _select_saved(group, arrays, particles)
    group.count = len(group.particles)
    group.needs = None


def _expand_saved(group: SequenceGroup, arrays: dict[str, np.ndarray], particles: int) -> None:
    whole = Offers.whole(torch.from_numpy(arrays["logw_S"]))
    n, one_G = len(arrays["logw_S"]), torch.ones(1, dtype=torch.int64)
    random = (torch.tensor([group.seed]), one_G * (SHRINK_ROUND + group.tally.preemptions), 0)
    sources, rows = ((one_G * 0, one_G * size) for size in (n, particles))
    weights, there_N = torch.from_numpy(arrays["logw_S"]), torch.ones(n, dtype=torch.bool)
    chosen = expand(
        whole, weights, there_N, sources, rows, one_G * particles, one_G * int(group.decoding.kind), random, particles
    )
    parent_X = chosen.parent_X[chosen.alive_X].numpy()
    for name, values in arrays.items():
        arrays[name] = values[parent_X]
    arrays["logw_S"] = chosen.mass_X[chosen.alive_X].numpy()
    group.particles = group.particles[:particles]


def _select_saved(group: SequenceGroup, arrays: dict[str, np.ndarray], particles: int) -> None:
    n = len(arrays["logw_S"])
    bounds = Bounds(*(torch.tensor([value], dtype=torch.int32) for value in (0, n, n, particles)))
    chosen = select(
        torch.from_numpy(arrays["logw_S"])[:, None],
        torch.ones(n, dtype=torch.bool),
        bounds,
        torch.zeros(1, dtype=torch.float64),
        torch.tensor([SCHEME_NAMES.index(group.params.resampling)], dtype=torch.int32),
        torch.tensor([group.seed]),
        torch.tensor([SHRINK_ROUND + group.tally.preemptions]),
    )
    alive_N = chosen.alive_A.numpy()
    ancestor_X = chosen.ancestor_A.numpy()[alive_N]
    for name, values in arrays.items():
        arrays[name] = values[ancestor_X]
    arrays["logw_S"] = chosen.logw_A.numpy()[alive_N]
    group.log_z += float(chosen.log_z_G[0])
    group.particles = group.particles[alive_N]


def _take_back(saved: dict[str, np.ndarray]) -> None:
    """Of a record, keep what has been confirmed."""
    confirmed_N = saved["block_S"] + 1
    saved["ended_S"] &= saved["length_S"] == confirmed_N
    saved["length_S"] = confirmed_N
    saved["logw_S"][:] = 0.0
