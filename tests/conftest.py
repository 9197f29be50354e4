"""Shared by the tests of several folders: commands run in this process, and settings of pytest, hypothesis and
torch."""

from __future__ import annotations

import gc
import importlib.util
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import settings

from services.cli.main import run

if not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
    import tests.interpreter  # noqa: F401

pytest_plugins = ["tests.ungrouped"]

# Set before Ray is imported: every cluster of the tests and every client of one has the same token.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

# torch looks up the name of every address at which a store is reached. Without a DNS server that answers, a lost query
# would cost five seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# No deadline, as machines may be busy: each test's timeout bounds its time. Every run draws new examples, so that few
# per run become many.
settings.register_profile("patient", deadline=None, max_examples=20)
settings.load_profile("patient")

# One thread per process: the suite runs one process per core, and the models are too small to gain from more.
torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude imported and collected objects from garbage collection: they stay anyway, and there are millions of
    them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


@pytest.fixture
def smcserve(capsys, monkeypatch) -> Callable[..., Ran]:
    return in_this_process(run, capsys, monkeypatch)


def in_this_process(run: Callable[[list[str]], int], capsys, monkeypatch) -> Callable[..., Ran]:
    """A function that runs command lines in this process, with a terminal wide enough that no line wraps."""
    monkeypatch.setenv("COLUMNS", "400")

    def call(*arguments: object) -> Ran:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        return Ran(code, *capsys.readouterr())

    return call
