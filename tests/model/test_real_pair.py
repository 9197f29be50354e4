"""A real chat model and a draft distilled from it (`benchmarks.real_pair`): logits against transformers, exact answers,
the number of tokens that the draft's trees hold, and streams of text in other scripts.

Skipped if the model is not available. Takes about 90 seconds of CPU."""

from __future__ import annotations

import importlib.util
import json
import statistics
from pathlib import Path

import pytest
import torch

from benchmarks.real_pair import build, find_wheel
from smc.algorithm.coupling import FIRST_EXPONENT
from smc.api.engine_config import EngineConfig
from smc.api.request import Request
from smc.api.sampling_params import SamplingParams
from smc.distill.measure import Context, DrawnContinuation, OwnText, TreeDraft, draw_next
from smc.local_engine import ModelPair, local_engine
from smc.model.decoder import RopeTable, hidden_states
from smc.scheduler.detokenizer import StopRules, TextStream

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("real pair")]

CONTEXTS = Path(__file__).with_name("real_contexts.json")
"""Written by `python -m benchmarks.tree_acceptance --json` with this pair."""
HELD = {1.0: 2.98, 0.7: 3.01, 0.4: 3.48}
"""Tokens of 5 that a tree of 8 rows holds, by temperature: means over 195 to 219 contexts of 16 texts; the standard
error between texts is 0.2."""
EXACT_TOKENS = 6
CHAT = (
    "Hi",
    "Why is the sky blue?",
    "Name three rivers.",
    "Tell me a joke.",
    "Who was Ada Lovelace?",
    "How do I boil an egg?",
    "Write a haiku about rain.",
    "What is 12 * 7?",
    "Plan a weekend in Rome.",
    "Is water wet?",
    "Give me a synonym of big.",
    "Explain gravity to a child.",
    "Summarise Hamlet.",
    "What's a good name for a cat?",
)
CODE = (
    "def fib(n):",
    "for (int i = 0; i < n; i++) {",
    "SELECT name FROM users WHERE",
    "import numpy as np\nx =",
    "<html><body>",
    "git commit -m",
    "fn main() {\n    let x",
    "class Node:\n    def __init__",
    "#include <stdio.h>",
    "print(f'{x:>8}')",
    "lambda x: x ** 2",
    "try:\n    pass\nexcept",
    "const f = async () =>",
)
OTHER_SCRIPTS = (
    "日本の首都はどこですか?",
    "今天天气怎么样?",
    "한국어로 대답해 주세요.",
    "Привет, как дела?",
    "Γειά σου Κόσμε",  # noqa: RUF001
    "مرحبا بالعالم",
    "שלום עולם",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "Ça va, où es-tu?",
    "Größe, Übung, Straße",
    "🙂🚀👩‍👩‍👧 emoji",
    "∑ x² ≤ ∞",
)
PROMPTS = (*CHAT, *CODE, *OTHER_SCRIPTS)


@pytest.fixture(scope="module")
def directories(tmp_path_factory) -> tuple[Path, Path]:
    if importlib.util.find_spec("gguf") is None:
        pytest.skip("the real pair needs the package gguf: pip install -e '.[real]'")
    try:
        wheel = find_wheel()
    except ValueError as error:
        pytest.skip(f"the real pair's wheel cannot be had: {error}")
    folder = tmp_path_factory.mktemp("real")
    build(wheel, folder / "target", folder / "draft")
    return folder / "target", folder / "draft"


@pytest.fixture(scope="module")
def pair(directories) -> ModelPair:
    return ModelPair.load(*directories)


def test_tokens_and_template_are_those_of_transformers(directories, pair):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(directories[0])
    assert len(PROMPTS) == 40
    for text in (*PROMPTS, "".join(PROMPTS), "  two  spaces\n\n\ttab 1234567890 "):
        assert pair.tokenizer.encode(text) == theirs(text)["input_ids"]
        messages = [{"role": "user", "content": text}]
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert pair.tokenizer.chat(messages) == ids


@pytest.mark.parametrize("role", [0, 1], ids=["target", "draft"])
def test_log_probabilities_are_those_of_transformers(directories, pair, role):
    from transformers import LlamaForCausalLM

    model, theirs = (
        (pair.target, pair.draft)[role],
        LlamaForCausalLM.from_pretrained(directories[role], dtype=torch.float32),
    )
    rope_LD = RopeTable(model.config, 64).table
    for prompt in ("Why is the sky blue?", "def fib(n):", "今天天气怎么样?"):
        tokens_1L = torch.tensor([pair.tokenizer.chat([{"role": "user", "content": prompt}])])
        with torch.inference_mode():
            ours_LV = torch.log_softmax(model.logits(hidden_states(model, rope_LD, tokens_1L)[0]), -1)
            theirs_TV = torch.log_softmax(theirs(tokens_1L).logits[0], -1)
        assert (ours_LV - theirs_TV).abs().max() < 2e-4


def test_exact_answers_are_the_targets(pair):
    """40 prompts at temperatures 0, 0.7 and 1. A text stream has no broken characters unless its answer has."""
    prompts = [tuple(pair.tokenizer.chat([{"role": "user", "content": text}])) for text in PROMPTS]
    config = EngineConfig(
        form="lockstep", block=2, drafting="always", max_slots=80, max_context=128, prefill_chunk=4096
    )
    engine, found = local_engine(pair, config), {}
    for method in ({"method": "target"}, {"method": "exact", "particles": 2}):
        requests = [
            Request(
                f"{temperature} {i}",
                prompt,
                SamplingParams(**method, temperature=temperature, seed=i, max_tokens=EXACT_TOKENS),
            )
            for temperature in (0.0, 0.7, 1.0)
            for i, prompt in enumerate(prompts)
        ]
        tokens, streamed = {}, dict.fromkeys((request.request_id for request in requests), "")
        for output in engine.run(requests):
            streamed[output.request_id] += output.text
            if output.answer is not None:
                tokens[output.request_id] = output.answer.tokens
                assert streamed[output.request_id] == output.answer.text
                assert output.answer.statistics.rounds
        found[method["method"]] = tokens
    assert len(found["target"]) == 120 and found["exact"] == found["target"]


def test_streams_have_no_broken_characters(pair):
    """In other scripts, a token may hold a part of a character; a stream sends each character when it is complete."""
    rules = StopRules(SamplingParams(stop=("#", "界!")), pair.tokenizer)
    for text in OTHER_SCRIPTS:
        tokens, stream = pair.tokenizer.encode(text), TextStream(rules)
        pieces = [stream.push([token]) for token in tokens]
        assert "\ufffd" not in "".join(pieces)
        assert "".join(pieces) + stream.finish(text) == text
    split = [token for text in OTHER_SCRIPTS for token in pair.tokenizer.encode(text)]
    assert any("\ufffd" in pair.tokenizer.decode([token]) for token in split)


def from_record(record: dict) -> tuple[OwnText, list[DrawnContinuation], list[int]]:
    """Invert `benchmarks.tree_acceptance.as_record`."""
    text = OwnText(tuple(record["tokens"]), record["answer_from"])
    drawn = [DrawnContinuation(Context(text, size), tuple(tokens), seed) for size, tokens, seed in record["drawn"]]
    return text, drawn, record["held"]


@pytest.mark.parametrize("temperature", HELD)
def test_trees_hold_as_many_tokens_as_recorded(pair, temperature):
    """The record holds counts for all contexts. This test drafts again at a part of them, and lets the target draw
    again at a few."""
    texts = [from_record(each) for each in json.loads(CONTEXTS.read_text())[f"{temperature:g}"]]
    assert statistics.mean([count for *_, held in texts for count in held]) == pytest.approx(
        HELD[temperature], abs=0.01
    )
    tree, again, before = TreeDraft(pair.draft, pair.tokenizer.size, rows=8, exponent=1.0), [], []
    for _, drawn, held in texts[:8]:
        again += tree.held(drawn[::4], temperature)
        before += held[::4]
    assert sum(one != other for one, other in zip(again, before)) <= 1  # near-ties may fall either way
    few = texts[0][1][:2]
    contexts = [each.context for each in few]
    assert draw_next(pair.target, contexts, 5, temperature, few[0].seed, pair.tokenizer.size) == few


@pytest.mark.xfail(
    strict=True, reason="rows end at full depth: nodes that no row of full depth goes through are not verified"
)
def test_the_engine_confirms_what_the_tree_holds(pair):
    """The first round after a context confirms the tokens that a tree grown there holds, and the target's next
    token."""
    (text, drawn, _), *_ = (from_record(each) for each in json.loads(CONTEXTS.read_text())["0.7"])
    tree = TreeDraft(pair.draft, pair.tokenizer.size, rows=8, exponent=FIRST_EXPONENT)
    for each in drawn[:3]:
        engine = local_engine(pair, EngineConfig(form="lockstep", block=5, drafting="always", max_slots=8))
        params = SamplingParams(
            method="exact", particles=8, temperature=0.7, seed=each.seed, max_tokens=7, ignore_eos=True
        )
        request = Request("r", text.tokens[: each.context.size], params)
        first, confirmed, *more = [output.tokens for output in engine.run([request]) if output.tokens]
        answer = sum(more, (*first, *confirmed))
        begun = OwnText((*request.prompt, *first), each.context.size)
        context = Context(begun, len(begun.tokens))
        (held,) = tree.held([DrawnContinuation(context, answer[len(first) :][:5], each.seed)], 0.7)
        assert len(first) == 1 and len(confirmed) == held + 1
