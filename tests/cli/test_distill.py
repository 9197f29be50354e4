"""`smcserve distill`: what it refuses, and prompts of a file."""

from __future__ import annotations

import json

import pytest

from services.cli.distill import _texts
from smc import demo
from smc.model.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "2", "--shape", "64x2"], "--layers and --shape exclude each other"),
        (["--shape", "wide"], "allowed: WIDTHxLAYERS"),
        (["--loss", "mse"], "loss='mse'; allowed: tv, chi2, kl"),
        (["--minutes", "1", "--tokens", "5"], "give exactly one of them"),
        (["--temperature", "3"], "allowed: at least one, each from 0 to 2"),
        (["--device", "tpu"], "--device tpu; allowed: cpu, cuda"),
        (["--resume"], "holds no run to resume"),
        (["--batch", "3", "--processes", "2"], "not a multiple of processes=2"),
    ],
)
def test_wrong_options_are_refused(smcserve, tmp_path, arguments, message):
    ran = smcserve("distill", "--out", tmp_path / "draft", *arguments)
    assert ran.code == 2 and message in ran.err
    assert not (tmp_path / "draft" / "config.json").exists()


def test_prompts_are_texts_prompts_and_messages(tmp_path):
    tokenizer = Tokenizer.load(demo.TARGET)
    question = "Mia has 12 apples."
    lines = [
        question,
        json.dumps({"prompt": question}),
        json.dumps({"messages": [{"role": "user", "content": question}]}),
    ]
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(lines) + "\n\n")
    expected = tuple(tokenizer.chat([{"role": "user", "content": question}]))
    assert _texts(demo.TARGET, file, None, is_demo=False) == (expected,) * 3
    file.write_text('{"text": 1}\n')
    with pytest.raises(ValueError, match=r"prompts.txt:1 has neither"):
        _texts(demo.TARGET, file, None, is_demo=False)
    file.write_text("\n")
    with pytest.raises(ValueError, match="holds no prompts"):
        _texts(demo.TARGET, file, None, is_demo=False)
