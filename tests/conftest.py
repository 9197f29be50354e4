"""What tests of several folders share: commands run in this process, and torch on one thread."""

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

# Before Ray is imported: every cluster of the tests, and whoever talks to one from here, has the same token.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

# torch asks for the name of every address that a store is reached at. Where nobody answers, a lost question costs five
# seconds otherwise.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# A busy machine is no failure: time is bounded by each test's timeout. Every run draws other examples, so that few a
# run become many.
settings.register_profile("patient", deadline=None, max_examples=20)
settings.load_profile("patient")

# One thread per process: the suite runs one process per core, and the models are too small to gain from more.
torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays: collections need not look through its millions of objects, neither now nor
    later."""
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
    """Runs command lines, on a terminal too wide to wrap a line."""
    monkeypatch.setenv("COLUMNS", "400")

    def call(*arguments: object) -> Ran:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        return Ran(code, *capsys.readouterr())

    return call
