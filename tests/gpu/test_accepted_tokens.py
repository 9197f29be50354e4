"""Exact decoding on a GPU confirms as many tokens a round as on a CPU. Its answers are the target's, whatever is
drafted, so a draft that reads or proposes something wrong shows only here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from smc import demo
from smc.api.engine_config import EngineConfig
from smc.demo import problems
from smc.local_engine import ModelPair, fitted_engine
from smc.model.draft_vocab import DraftVocab
from smc.model.linear import FP8
from tests.gpu.test_agreement import DEVICES, load, requests

FORMS = {
    "lockstep": EngineConfig(form="lockstep", block=5, drafting="always"),
    "look-ahead": EngineConfig(form="lookahead", block=5, branches=4, drafting="always"),
    "drafting again": EngineConfig(form="lookahead", block=5, branches=4, drafting="always", redrafting="always"),
}
LEAST = 0.95
"""Smallest share of the CPU's tokens a round: 16 answers of a rounded model differ by 1 or 2%."""


def text_of_problems(folder: Path) -> Path:
    """Write solved problems to a file, from which a small draft vocabulary is chosen."""
    solved = problems.generate(3, 200, "train")
    (folder / "solved.txt").write_text("\n".join(f"{one.question}\n{one.solution}" for one in solved))
    return folder / "solved.txt"


def with_head(pair: ModelPair, folder: Path) -> ModelPair:
    """Return the pair with a head of 400 tokens."""
    vocab = DraftVocab.of(400, text_of_problems(folder), pair.tokenizer)
    return replace(pair, draft_head=vocab.head(pair.draft))


def tokens_a_round(pair: ModelPair, config: EngineConfig, particles: int) -> float:
    asked = requests(pair, 16, method="exact", particles=particles)
    engine = fitted_engine(pair, config, asked, 2)
    for _ in engine.run(asked):
        pass
    return engine.take_stats().exact["walk"].tokens_a_round


@pytest.mark.parametrize("devices", DEVICES, ids=["one GPU", "two GPUs"])
@pytest.mark.parametrize("has_head", [False, True], ids=["whole head", "small head"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=["bfloat16", "fp8"])
@pytest.mark.parametrize("form", FORMS)
def test_as_many_tokens_are_confirmed_as_on_a_cpu(form, dtype, has_head, devices, tmp_path):
    on_cpu, there = ModelPair.load(demo.TARGET, demo.DRAFT), load(dtype, devices)
    if has_head:
        on_cpu, there = with_head(on_cpu, tmp_path), with_head(there, tmp_path)
    for particles in (1, 8):
        expected, found = (tokens_a_round(pair, FORMS[form], particles) for pair in (on_cpu, there))
        print(f"N = {particles}: {found:.2f} tokens a round, on a CPU {expected:.2f}")
        assert found >= LEAST * expected
