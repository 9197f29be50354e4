"""Constraints over a vocabulary of single bytes: which texts they allow, and texts written by chance."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import numpy as np

from smc.api.constraint import Constraint
from smc.constraint_masks import Follower, MaskWriter
from smc.constraints import Compiler
from smc.mask_reader import MaskPath
from smc.stops import StopMachine, TokenBytes

END = 256
"""The token that ends texts."""


@cache
def compiler() -> Compiler:
    offset_V = np.minimum(np.arange(258), 256)
    return Compiler(TokenBytes(np.arange(256, dtype=np.uint8), offset_V.astype(np.int32), (END,)))


@cache
def writer() -> MaskWriter:
    return MaskWriter(compiler())


def allows(given: dict[str, Any], text: str) -> bool:
    constraint = Constraint.of(given)
    follower = Follower(StopMachine.of((), (), (), constraint), compiler())
    return follower.ends(np.array(list(text.encode()), dtype=np.int64))


def walk(given: dict[str, Any], seed: int, longest: int = 60) -> str | None:
    """Write a text of allowed tokens, drawn by chance. Returns None if it is not complete after `longest` tokens.
    Asserts that some token is allowed everywhere."""
    dice = random.Random(seed)
    follower = Follower(StopMachine.of((), (), (), Constraint.of(given)), compiler())
    text: list[int] = []
    while len(text) < longest:
        mask_RW = np.zeros((1, compiler().words), dtype=np.int32)
        writer().begin_round()
        writer().write([(follower, [MaskPath(np.array(text, dtype=np.int64), len(text), 0, 1)])], mask_RW)
        assert follower.failure is None, follower.failure
        allowed = np.flatnonzero(np.unpackbits(mask_RW.view(np.uint8)[0], bitorder="little")[: END + 1])
        assert len(allowed), (json.dumps(given), bytes(text))
        token = dice.choice(allowed.tolist())
        if token == END:
            return bytes(text).decode()
        text.append(token)
    return None
