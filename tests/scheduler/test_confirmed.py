"""Answers that go on in another engine after the tokens that the first one delivered: the whole answer is the same."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from smc.api.request import Answer, Output, Request
from smc.api.sampling_params import SamplingParams
from smc.local_engine import local_engine
from tests.scheduler.harness import CASES, answers, assert_empty, config_id, request, running
from tests.scheduler.pairs import tiny_pair
from tests.scheduler.random_histories import small_engine
from tests.scheduler.test_exact import settings_of

ROWS = {"exact": {"particles": 3}, "target": {}}
LAWS = [
    {"stop": ("ab", "cca"), "min_tokens": 4},
    {"logprobs": True, "top_logprobs": 2},
    {"prompt_logprobs": 1, "temperature": 0.0},
    {"guidance_scale": 1.5},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"bad_words": ("ab", "ca")},
    {"constraint": {"regex": "[ab]{3}c[abc]{6,}"}, "logprobs": True},
]


def delivered(engine, requests: list[Request]) -> dict[str, tuple[Answer, list[Output]]]:
    """Run requests; return the answer and all outputs of each, by its id."""
    outputs: dict[str, list[Output]] = {one.request_id: [] for one in requests}
    for output in engine.run(requests):
        outputs[output.request_id].append(output)
    assert_empty(engine)
    return {name: (found[-1].answer, found) for name, found in outputs.items()}


def assert_whole(answer: Answer, outputs: list[Output], expected: Answer) -> None:
    """The answer is the expected one, and its outputs contain all of it."""
    assert answer.error is None and (answer.tokens, answer.text) == (expected.tokens, expected.text)
    assert (answer.finish_reason, answer.matched, answer.seed) == (
        expected.finish_reason,
        expected.matched,
        expected.seed,
    )
    assert sum((output.tokens for output in outputs), ()) == expected.tokens
    assert "".join(output.text for output in outputs) == expected.text
    assert (answer.logprobs is None) == (expected.logprobs is None)
    assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert [token.rank for token in answer.prompt_logprobs or ()] == [
        token.rank for token in expected.prompt_logprobs or ()
    ]
    assert len(answer.top_logprobs or ()) == len(expected.top_logprobs or ())


def asked(count: int) -> list[Request]:
    rng = random.Random(count)
    found = []
    for i in range(count):
        method = ("exact", "target")[i % 2]
        more = LAWS[i // 2] if i // 2 < len(LAWS) else {}
        law = ({"seed": i, "max_tokens": 18} if "constraint" in more else settings_of(rng)) | more
        law["max_tokens"] = max(law["max_tokens"], 12)
        prompt = [rng.randrange(4) for _ in range(rng.randint(2, 30))]
        found.append(request(prompt, str(i), method=method, **ROWS[method], **law))
    return found


@pytest.mark.parametrize("config", CASES, ids=config_id)
def test_the_rest_is_the_same_wherever_it_begins(config):
    """After every number of tokens, also all of them, where the end itself was not delivered. Requests of all kinds
    run beside each other."""
    requests = asked(20)
    whole = delivered(local_engine(tiny_pair(), config), requests)
    lengths = {name: len(answer.tokens) for name, (answer, _) in whole.items()}
    assert min(lengths.values()) >= 1 and max(lengths.values()) >= 12
    rng = random.Random(1)
    for part in range(6):
        cuts = {name: length if part == 0 else rng.randint(1, length) for name, length in lengths.items()}
        rest = [
            replace(
                one,
                confirmed=whole[one.request_id][0].tokens[: cuts[one.request_id]],
                confirmed_logprobs=(whole[one.request_id][0].logprobs or ())[: cuts[one.request_id]],
            )
            for one in requests
        ]
        for name, (answer, outputs) in delivered(local_engine(tiny_pair(), config), rest).items():
            assert_whole(answer, outputs, whole[name][0])


@pytest.mark.parametrize("config", CASES, ids=config_id)
def test_it_may_be_preempted_and_lose_its_draft(config, monkeypatch):
    one = request([1, 2, 3, 0], method="exact", particles=3, seed=5, max_tokens=40, ignore_eos=True)
    expected = answers(local_engine(tiny_pair(), config), [one])["r"]
    engine = small_engine(config, monkeypatch, ahead=False)
    engine.submit(replace(one, confirmed=expected.tokens[:17]))
    outputs, steps = [], 0
    while not engine.idle:
        outputs += engine.step()
        steps += 1
        if steps in (2, 5):
            engine.registry.preempt(engine.registry.groups["r"]) if running(engine) else None
        if steps == 8:
            assert engine.detach_draft() == []
    assert_whole(outputs[-1].answer, outputs, expected)


def test_it_runs_no_round_for_what_was_delivered():
    """The confirmed tokens run through the models like a prompt."""
    one = Request("r", (1, 2, 3), SamplingParams(method="target", seed=1, max_tokens=56, ignore_eos=True))
    expected = answers(local_engine(tiny_pair(), CASES[0]), [one])["r"]
    rest = answers(local_engine(tiny_pair(), CASES[0]), [replace(one, confirmed=expected.tokens[:52])])["r"]
    assert rest.tokens == expected.tokens and rest.statistics.rounds <= 4 < expected.statistics.rounds


def test_populations_do_not_go_on():
    engine = local_engine(tiny_pair(), CASES[0])
    for law in ({"method": "smc"}, {"method": "exact", "verification": "rejection"}):
        with pytest.raises(AssertionError, match="does not go on elsewhere"):
            engine.submit(replace(request(request_id=str(law), particles=2, max_tokens=8, **law), confirmed=(1, 2)))
