"""Answers whose reports list many tokens are written beside the event loop, in pieces that let the loop run."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest

from services.gateway import request_handler
from services.openai import completions, dialects, responses
from services.openai.bodies import CHAT, COMPLETIONS
from services.openai.dialects import AnsweredCall, AnswerHeading
from services.openai.requests import Served
from services.openai.responses import RESPONSES
from services.openai.server import DIALECTS
from smc.api.request import Answer, FinishReason, Output, Particle, PromptToken, Request, Statistics
from tests.openai.asking import post, user

LEAST = 100
"""Number of tokens from which a report counts as long in these tests."""
PARTICLES = {"method": "smc", "population": "independent", "particles": 8, "return_particles": True, "max_tokens": 20}
LONG = {
    "chats": (CHAT, {"messages": user("x"), "n": 3, "logprobs": True, "max_tokens": 40}),
    "completions": (COMPLETIONS, {"prompt": "x", "n": 3, "logprobs": True, "max_tokens": 40}),
    "particles": (CHAT, {"messages": user("x")} | PARTICLES),
    "particles in a stream": (CHAT, {"messages": user("x"), "stream": True} | PARTICLES),
    "a prompt in several answers": (COMPLETIONS, {"prompt": [5, 6], "n": 6, "prompt_logprobs": 20, "max_tokens": 1}),
    "responses": (RESPONSES, {"input": "x", "top_logprobs": 5, "max_output_tokens": 30}),
}
"""Paths and bodies of calls whose reports list more tokens than that."""


@pytest.mark.parametrize("name", LONG)
def test_long_reports_are_written_in_a_thread(service, monkeypatch, name):
    writers = []
    monkeypatch.setattr(request_handler, "LONG_REPORT", LEAST)

    def noted(write):
        def work(*args):
            writers.append(threading.current_thread())
            return write(*args)

        return work

    for module in (completions, responses):
        monkeypatch.setattr(module, "smc_block", noted(module.smc_block))
    path, body = LONG[name]
    assert post(service, json.dumps(body | {"ignore_eos": True}).encode(), path).status == 200
    assert writers and service._thread not in writers


def test_no_piece_of_a_document_is_long(pair, monkeypatch):
    """A document is written in pieces, because no other thread runs while the library writes one."""
    pieces, write = [], json.dumps

    def noted(*args, **options):
        pieces.append(write(*args, **options))
        return pieces[-1]

    monkeypatch.setattr(dialects.json, "dumps", noted)
    tokens = tuple(pair.tokenizer.encode("12 apples and 30 pears. " * 40, add_special=False))
    likeliest = (tuple((token, -1.0) for token in range(5, 25)),) * len(tokens)
    values = (-1.0,) * len(tokens)
    text, finish = pair.tokenizer.decode(tokens), FinishReason.LENGTH
    scored = tuple(PromptToken(-1.0, 1, likeliest[0]) for _ in tokens[1:])
    particles = (Particle(tokens, text, finish, 1.0),)
    statistics = Statistics(1)
    answer = Answer("a", tokens, text, finish, None, 1, len(tokens), statistics, 0.0, values, likeliest)
    answer = replace(answer, prompt_logprobs=scored, particles=particles)
    served = Served(("demo",), pair.tokenizer)
    for path, body in (
        (CHAT, {"messages": user("x"), "logprobs": True, "top_logprobs": 20, "prompt_logprobs": 20}),
        (COMPLETIONS, {"prompt": [*tokens], "logprobs": 20, "prompt_logprobs": 20, "echo": True}),
        (RESPONSES, {"input": "x", "top_logprobs": 20}),
    ):
        call = DIALECTS[path].read(body, served)
        request = Request("a", tokens, call.completion.params(500, 1))
        heading = AnswerHeading("a", 0, "demo", call.completion.chat, "")
        answered = AnsweredCall(heading, call.completion, [request], pair.tokenizer, None)
        pieces.clear()
        whole = call.make_writer(answered).whole([answer])
        streamed = call.make_writer(answered).update(0, Output("a", tokens, text, answer, values))
        assert len(whole) > 100_000 and len(streamed) > 100_000
        assert max(map(len, pieces)) < 8_000, path
