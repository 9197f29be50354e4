"""All ranks agree on whether they sum in symmetric memory, even if it fails on one of them. tests/gpu/test_symmetric.py
covers the sums themselves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from services.workers import tensor_parallel as symmetric
from services.workers.tensor_parallel import SymmetricSum

ERRORS = [
    (RuntimeError, "no peer access\nfrom here"),
    (RuntimeError, ""),
    (RuntimeError, "\n"),
    (ImportError, "not in this torch"),
]


# Connecting to a store sometimes takes five seconds.
PATIENCE = timedelta(seconds=60)


class Ranks:
    """Two ranks, each a thread with its own store; one of them may fail."""

    def __init__(
        self, monkeypatch, fails: str | None = None, kind: type[Exception] = RuntimeError, what: str = ""
    ) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
        made = []

        def make(_self: SymmetricSum) -> None:
            made.append(1)
            if fails == "make" and len(made) == 2:
                raise kind(what)

        def meet(_self: SymmetricSum, store: dist.Store, name: str, rank: int, degree: int) -> None:
            if fails == "meet" and rank == 1:
                raise kind(what)

        monkeypatch.setattr(SymmetricSum, "__init__", make)
        monkeypatch.setattr(SymmetricSum, "meet", meet)

    def between(self) -> list[SymmetricSum | None]:
        def one(rank: int) -> SymmetricSum | None:
            store = dist.TCPStore("127.0.0.1", self._store.port, is_master=False, timeout=PATIENCE)
            return SymmetricSum.between(store, "few", rank, 2)

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(one, range(2)))


@pytest.mark.parametrize("fails", ["make", "meet"])
@pytest.mark.parametrize(("kind", "what"), ERRORS)
def test_all_ranks_fall_back_if_one_fails(monkeypatch, capfd, fails, kind, what):
    assert Ranks(monkeypatch, fails, kind, what).between() == [None, None]
    said = " ".join(what.split()) or kind.__name__
    assert f"symmetric memory is not to be had: {said}" in capfd.readouterr().err


def test_all_ranks_use_symmetric_memory(monkeypatch):
    first, second = Ranks(monkeypatch).between()
    assert isinstance(first, SymmetricSum) and isinstance(second, SymmetricSum)


def test_ranks_in_different_places_do_not_try(monkeypatch):
    places = iter(["here", "there"])
    monkeypatch.setattr(symmetric, "_host_and_container", lambda: next(places))
    assert Ranks(monkeypatch, "make").between() == [None, None]
