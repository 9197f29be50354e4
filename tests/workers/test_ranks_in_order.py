"""Sums over ranks, in processes with gloo: with `in_order`, a row's sum does not depend on the other rows."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from services.link.store import StoreServer, connect_store

SECRET, DEGREE, TOKENS = "secret", 3, (1, 7, 300)


def part_of(rank: int) -> torch.Tensor:
    """Parts whose sum depends on the order of additions."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(max(TOKENS), 96, generator=generator) * 10.0 ** (3 * (rank % 2))


def summed(rank: int, port: int, results: multiprocessing.Queue) -> None:
    from services.workers.tensor_parallel import TensorParallel

    store = connect_store("127.0.0.1", port, SECRET, 60.0)
    group = TensorParallel(store, "ranks", rank, DEGREE, torch.device("cpu"), 60.0, in_order=True)
    results.put((rank, [group(part_of(rank)[:tokens].clone()).numpy() for tokens in TOKENS]))
    group.share(torch.zeros(1))  # No rank leaves before the others have their sums.


@pytest.mark.slow
def test_parts_are_added_in_the_order_of_ranks():
    context, store = multiprocessing.get_context("spawn"), StoreServer("127.0.0.1", SECRET, 60.0)
    results = context.Queue()
    ranks = [context.Process(target=summed, args=(rank, store.port, results), daemon=True) for rank in range(DEGREE)]
    for rank in ranks:
        rank.start()
    found = dict(results.get(timeout=120) for _ in ranks)
    expected = part_of(0)
    for rank in range(1, DEGREE):
        expected = expected + part_of(rank)
    backwards = part_of(2) + part_of(1) + part_of(0)
    assert not torch.equal(backwards, expected), "the order can be seen"
    for sums in found.values():
        for tokens, made in zip(TOKENS, sums):
            assert torch.equal(torch.from_numpy(made), expected[:tokens])
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0
