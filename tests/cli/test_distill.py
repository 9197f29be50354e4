"""`smcserve distill`: refused options, and prompts read from a file."""

from __future__ import annotations

import json

import pytest

from services.cli.distill import _texts, fitting
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
    (tmp_path / "prompts.txt").write_text("Mia has 12 apples.")
    ran = smcserve("distill", "--out", tmp_path / "draft", "--prompts", tmp_path / "prompts.txt", *arguments)
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


def test_prompts_with_odd_lines(tmp_path):
    """A byte order mark, and line separators inside texts."""
    tokenizer = Tokenizer.load(demo.TARGET)
    questions = ["Mia has 12\u2028apples.", "One\x0cpage\x85more"]
    file = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": each}, ensure_ascii=False) for each in questions]
    file.write_text("\ufeff" + "\r\n".join(lines) + "\r\n", encoding="utf-8", newline="")
    expected = tuple(tuple(tokenizer.chat([{"role": "user", "content": each}])) for each in questions)
    assert _texts(demo.TARGET, file, None, is_demo=False) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": ""}', "prompts.txt:2 has an empty prompt"),
        (b'{"messages": []}', "prompts.txt:2 has an empty prompt"),
        (b'{"messages": ["hello"]}', "prompts.txt:2: the chat template cannot render"),
        (b"\xff\xfe", "prompts.txt is not UTF-8 text"),
        (b'{"prompt": "\\ud800"}', "prompts.txt:2: cannot encode"),
    ],
)
def test_prompts_that_cannot_be_used(tmp_path, line, message):
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"Mia has 12 apples.\n" + line + b"\n")
    with pytest.raises(ValueError, match=message):
        _texts(demo.TARGET, file, None, is_demo=False)


def test_prompts_that_are_too_long_are_left_out(capsys):
    """Logs contain some; they do not stop a run."""
    short, long = (1,) * 508, (1,) * 509
    assert fitting((short, long), 512) == (short,)
    assert "1 of 2 prompts are left out: they have more than 508 tokens (--width 512)" in capsys.readouterr().err
    with pytest.raises(ValueError, match="all 1 prompts have more than 508 tokens; give a --width above 512"):
        fitting((long,), 512)
