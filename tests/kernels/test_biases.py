"""The kernel adds the same biases to logits as the reference, for any rows and table entries."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from smc.api.limits import MAX_BIASES, MAX_STOP_IDS
from smc.executor.logit_changes import WIDTHS, LogitBiases, add_biases, width_of
from smc.kernels import sampling
from smc.stops import StopMachine

VOCAB = 5000
rng = np.random.default_rng(5)
SOME = np.sort(rng.choice(VOCAB, 700, replace=False))


def machine_of(stops: int, biases: int) -> StopMachine:
    """A stop machine in which some tokens are both stop tokens and biased, and some lie outside the vocabulary."""
    ids = rng.choice(VOCAB + 40, (2, max(stops, biases, 1)))
    values = {int(token): float(value) for token, value in zip(ids[1][:biases], rng.normal(size=biases) * 50)}
    return StopMachine.of(
        [*ids[0][:stops].tolist(), *list(values)[: stops // 3]][:MAX_STOP_IDS], (), tuple(sorted(values.items()))
    )


MACHINES = [
    machine_of(0, 0),
    machine_of(1, 0),
    machine_of(3, 13),
    machine_of(0, 200),
    machine_of(MAX_STOP_IDS, MAX_BIASES),
]


@pytest.mark.parametrize(
    ("ids_M", "dtype", "each"),
    [
        (None, torch.float32, 1),
        (None, torch.bfloat16, 3),
        (SOME, torch.float32, 3),
        (SOME, torch.bfloat16, 1),
    ],
    ids=["all", "all rounded", "some", "some rounded"],
)
def test_rows_are_changed_as_by_the_reference(device, ids_M, dtype, each):
    columns = VOCAB if ids_M is None else len(ids_M)
    biases = LogitBiases(len(MACHINES) + 1, columns, device, ids_M)
    for entry, machine in enumerate(MACHINES, 1):
        biases.set(entry, machine)
    # An entry is reused for a machine with fewer tokens.
    biases.set(3, MACHINES[1])
    entry_S = torch.tensor([*range(len(MACHINES) + 1), 0], device=device)
    least_S = torch.tensor([9, 0, 5, 9, 3, 6, 0], device=device)
    slot_X = torch.tensor([0, 1, 2, 3, 4, 5, 5, 6], dtype=torch.int32, device=device)
    position_R = torch.arange(8 * each, device=device) % 11
    logits_RV = torch.randn(8 * each, columns + 5, device=device).to(dtype)
    logits_RV[0, :9] = -torch.inf
    slots, rows = (biases.tables, entry_S, least_S), (slot_X, position_R, WIDTHS[-1])
    expected_RV = add_biases(*slots, logits_RV.float(), *rows).to(dtype)
    found_RV = sampling.add_biases(*slots, logits_RV.clone(), *rows)
    torch.testing.assert_close(found_RV, expected_RV, atol=1e-5, rtol=1e-2 if dtype is torch.bfloat16 else 1e-6)
    assert torch.equal(found_RV == -torch.inf, expected_RV == -torch.inf) and (expected_RV[each:] == -torch.inf).any()
    assert torch.equal(found_RV[:, columns:], logits_RV[:, columns:]) and torch.equal(found_RV[:each], logits_RV[:each])


def test_rounds_look_at_as_many_tokens_as_an_entry_has():
    assert [width_of(machine) for machine in MACHINES] == [WIDTHS[0], WIDTHS[0], WIDTHS[0], WIDTHS[1], WIDTHS[2]]
    biases = LogitBiases(len(MACHINES) + 1, VOCAB, torch.device("cpu"))
    for entry, machine in enumerate(MACHINES, 1):
        biases.set(entry, machine)
        assert int(biases.tables.count_Z[entry]) <= width_of(machine)
