"""Reasoning before an answer is returned in a field of its own, and a constraint begins where the reasoning ends."""

from __future__ import annotations

import json
import random
import re

import pytest
import tokenizers

from services.openai.parts import PartReader, Reasoning, ReasoningReader, message_of
from services.openai.tool_calls import CallSyntax, ToolFormat
from smc import demo
from smc.local_engine import ModelPair
from smc.model.tokenizer import Tokenizer
from tests.gateway.harness import serving
from tests.openai.asking import chat, events, post

TEXTS = [
    ("<think>\na < b</think>\n\nyes", False, "\na < b", "yes"),
    (" <think>a</thi</think>b</think>", False, "a</thi", "b</think>"),
    ("so</think>\nno", True, "so", "no"),
    ("no end </thin", True, "no end </thin", ""),
    ("<thing>", False, "", "<thing>"),
    ("plain", False, "", "plain"),
    ("<th", False, "", "<th"),
    ("", False, "", ""),
]


@pytest.mark.parametrize(("text", "is_open", "reasoning", "answer"), TEXTS)
def test_texts_are_divided_however_they_are_cut(text, is_open, reasoning, answer):
    dice = random.Random(1)
    for _ in range(40):
        reader, found, left = ReasoningReader(is_open), ["", ""], text
        while left:
            size = dice.randint(1, 6)
            for i, more in enumerate(reader.push(left[:size])):
                found[i] += more
            left = left[size:]
        for i, more in enumerate(reader.finish()):
            found[i] += more
        assert found == [reasoning, answer]


def test_calls_after_reasoning():
    text = '<think>f?</think>\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    message = message_of(text, PartReader(CallSyntax(ToolFormat.HERMES), Reasoning(5, False)), "x")
    assert (message["reasoning_content"], message["content"]) == ("f?", None)
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}


def thinking(tokenizer: Tokenizer) -> Tokenizer:
    """The demo pair's tokenizer, with one token of its vocabulary changed to `</think>`, the end of reasoning that the
    prompt begins."""
    parts = json.loads(tokenizer._tokenizer.to_str())
    vocabulary = parts["model"]["vocab"]
    digit = vocabulary.pop("7")
    parts["added_tokens"].append(
        {"id": digit, "content": "</think>", "special": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    )
    vocabulary["</think>"] = digit
    changed = tokenizers.Tokenizer.from_str(json.dumps(parts))
    template = (tokenizer.chat_template or "") + "{% if done %}</think>{% endif %}"
    return Tokenizer(changed, tokenizer.eos_ids, tokenizer._special, template)


def test_a_constraint_begins_where_reasoning_ends():
    pair = ModelPair.load(demo.TARGET, demo.DRAFT)
    changed = ModelPair(pair.target, pair.draft, thinking(pair.tokenizer), pair.max_context)
    fields = {"guided_regex": "(yes|no)", "max_tokens": 200, "method": "exact", "seed": 1}
    fields["logit_bias"] = {str(changed.tokenizer.id_of("</think>")): 9}
    with serving(changed, http_port=0, served_model_names=("demo",)) as service:
        whole = post(service, chat(**fields)).json["choices"][0]
        assert whole["finish_reason"] == "stop"
        content = whole["message"]["content"]
        assert re.fullmatch("(?s).*</think>(yes|no)", content)
        parts = [one["choices"][0]["delta"] for one in events(post(service, chat(stream=True, **fields)).data)[:-1]]
        assert "".join(part.get("content") or "" for part in parts) == content
        done = post(service, chat(chat_template_kwargs={"done": True}, **fields)).json["choices"][0]
        assert done["message"]["content"] in ("yes", "no")
