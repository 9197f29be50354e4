"""Warnings that a process gives once."""

from __future__ import annotations

import logging

import torch

from smc.attention.prompts import PromptAttention
from smc.once import warn_once


def test_many_engines_warn_once(caplog):
    """Every engine on a GPU chooses its attention of prompts; another cause is another warning."""
    for head_dim in (7, 7, 9, 7):
        PromptAttention((4, 4), head_dim, torch.bfloat16, torch.device("cuda"))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and all("torch computes the attention of prompts" in text for text in said)
    assert "head dimension 7 in" in said[0] and "head dimension 9 in" in said[1]


def test_the_text_with_its_values_counts(caplog):
    one, other = logging.getLogger("tests.once"), logging.getLogger("tests.once.other")
    for logger, value in ((one, 1), (one, 1), (one, 2), (other, 1)):
        warn_once(logger, "100%% of %s", value)
    assert [(record.name, record.getMessage()) for record in caplog.records] == [
        ("tests.once", "100% of 1"),
        ("tests.once", "100% of 2"),
        ("tests.once.other", "100% of 1"),
    ]
