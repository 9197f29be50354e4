"""Logit biases and `min_tokens`: every method samples from the biased distribution, and the weights of SMC account for
it."""

from __future__ import annotations

import math
import random
from collections import Counter
from functools import cache

import pytest
import torch

from smc.api.engine_config import EngineConfig
from smc.api.request import FinishReason
from smc.api.sampling_params import SamplingParams
from smc.local_engine import local_engine
from smc.scheduler.detokenizer import StopRules, TextStream
from smc.stops import DONE, START, StopTables, TokenBytes, grow
from tests.scheduler.harness import FORMS, answers, config_id, processed, request, wide
from tests.scheduler.pairs import LETTERS, letter_tokenizer, next_log_probs, tiny_pair, total_variation

PROMPT = (2, 1)
EOS = 3
BIAS = ((0, -0.7), (2, 1.3))
COUNT = 110
"""Number of requests whose weighted answers are averaged."""


@cache
def log_law(
    draft: bool, prefix: tuple[int, ...], bias: tuple, min_tokens: int, temperature: float = 1.0
) -> torch.Tensor:
    """log p [V] after a part of an answer, under the draft or the target."""
    pair = tiny_pair()
    logits_V = next_log_probs(pair.draft if draft else pair.target, (*PROMPT, *prefix)).clone()
    for token, value in bias:
        logits_V[token] += value
    if len(prefix) < min_tokens:
        logits_V[EOS] = -torch.inf
    return torch.log_softmax(logits_V / temperature, -1)


def law_of_answers(longest: int, min_tokens: int, bias: tuple) -> dict[tuple[int, ...], float]:
    law: dict[tuple[int, ...], float] = {}

    def visit(prefix: tuple[int, ...], mass: float) -> None:
        if len(prefix) == longest or EOS in prefix:
            law[prefix] = mass
            return
        for token, log_p in enumerate(log_law(False, prefix, bias, min_tokens).tolist()):
            if log_p > -math.inf:
                visit((*prefix, token), mass * math.exp(log_p))

    visit((), 1.0)
    return law


@pytest.mark.parametrize(
    ("config", "bias", "min_tokens"),
    [
        (FORMS[0], BIAS, 0),
        (FORMS[1], (), 5),
        (FORMS[0], ((EOS, 2.0), (1, -100.0)), 6),
        (FORMS[1], BIAS, 4),
    ],
    ids=lambda value: config_id(value) if isinstance(value, EngineConfig) else str(value),
)
def test_biased_weight_of_one_particle(config, bias, min_tokens):
    """log Z-hat of a single particle is the sum of log p - log q over its drafted tokens, with both distributions
    biased, also where `min_tokens` ends inside a block. `logprobs` come from the same p."""
    settings = {"particles": 1, "ess_threshold": 0, "max_tokens": 11, "logprobs": True, "temperature": 0.8}
    asked = [
        request(
            PROMPT,
            str(seed),
            seed=seed,
            logit_bias=dict(bias),
            min_tokens=min(min_tokens + seed % 3, 11) if min_tokens else 0,
            **settings,
        )
        for seed in range(6)
    ]
    found, reasons = answers(local_engine(tiny_pair(), processed(config)), asked), Counter()
    for one in asked:
        answer, least = found[one.request_id], one.params.min_tokens
        reasons[answer.finish_reason] += 1
        assert EOS not in answer.tokens[: max(least, len(answer.tokens) - 1)]
        p, q = (
            [log_law(draft, answer.tokens[:i], bias, least, 0.8)[token].item() for i, token in enumerate(answer.tokens)]
            for draft in (False, True)
        )
        assert answer.logprobs == pytest.approx(p, abs=1e-4)
        drafted = (lambda i: i % (config.block + 1) != 0) if not config.lookahead else (lambda i: i > 0)
        assert answer.statistics.log_z == pytest.approx(sum(p[i] - q[i] for i in range(len(p)) if drafted(i)), abs=3e-4)
    assert reasons[FinishReason.EOS] and set(reasons) <= {FinishReason.EOS, FinishReason.LENGTH}


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (FORMS[0], {}),
        pytest.param(FORMS[2], {"resampling": "ssp"}, marks=pytest.mark.slow),
    ],
    ids=["lockstep-distinct", "lookahead-independent"],
)
def test_weighted_answers_have_the_law_that_was_asked_for(config, settings):
    """Z-hat and the particles' weights estimate the probability of every answer without bias, and requests without a
    bias in the same batch are unaffected. The seeds are fixed; the distance is half of what is allowed, and it is
    noise: four times the requests halve it."""
    law, plain = law_of_answers(4, 2, BIAS), law_of_answers(4, 0, ())
    settings = settings | {"particles": 8, "max_tokens": 4, "return_particles": True}
    asked = [request(PROMPT, str(s), seed=s, min_tokens=2, logit_bias=BIAS, **settings) for s in range(COUNT)]
    beside = [request(PROMPT, f"beside {s}", seed=s, **settings) for s in range(20)]
    found = answers(local_engine(tiny_pair(), wide(config)), [*asked, *beside])
    mass = Counter()
    for one in asked:
        answer = found[one.request_id]
        for particle in answer.particles:
            mass[particle.tokens] += particle.weight * math.exp(answer.statistics.log_z)
    assert sum(mass.values()) / COUNT == pytest.approx(1, abs=0.1)
    assert total_variation(law, mass, COUNT) < 0.15 < 0.35 < total_variation(plain, mass, COUNT)
    others = answers(local_engine(tiny_pair(), config), beside)
    assert all(found[one.request_id].tokens == others[one.request_id].tokens for one in beside)


@pytest.mark.parametrize(
    ("config", "method"),
    [
        (FORMS[0], "smc"),
        (FORMS[1], "target"),
        (FORMS[0], "draft"),
        pytest.param(FORMS[1], "smc", marks=pytest.mark.slow),
    ],
    ids=["lockstep-smc", "target", "draft", "lookahead-smc"],
)
def test_stop_strings_that_are_complete_too_early_have_no_effect(config, method):
    """A stop string that is complete within the first `min_tokens` tokens is ignored; one that begins there and is
    complete later ends the answer."""
    asked = [
        request(
            PROMPT,
            f"{least} {seed}",
            method=method,
            seed=seed,
            max_tokens=12,
            ignore_eos=True,
            min_tokens=least,
            stop=("ab", "ca"),
        )
        for least in (1, 4, 9)
        for seed in range(4)
    ]
    engine, texts = local_engine(tiny_pair(), config), Counter()
    done = {}
    for output in engine.run(asked):
        texts[output.request_id] = (texts[output.request_id] or "") + output.text
        done[output.request_id] = output.answer or done.get(output.request_id)
    passed = 0
    for one in asked:
        answer, text, begin, ends = done[one.request_id], "", 0, None
        for index, token in enumerate(answer.tokens):
            assert ends is None, "nothing follows what ended it"
            text += "" if token == EOS else LETTERS[token]
            if text[begin:].endswith(("ab", "ca")):
                passed += index < one.params.min_tokens
                ends, begin = (None, len(text)) if index < one.params.min_tokens else (len(text) - 2, begin)
        assert (answer.finish_reason is FinishReason.STOP_STRING) == (ends is not None)
        assert answer.text == text[:ends] == texts[one.request_id]
    assert passed > 2


def test_an_answer_that_cannot_end_before_its_length():
    for method in ("smc", "exact", "target", "draft"):
        one = request(PROMPT, seed=1, method=method, max_tokens=7, min_tokens=7, logit_bias={EOS: 100})
        answer = answers(local_engine(tiny_pair(), EngineConfig(block=3, branches=2)), [one])["r"]
        assert len(answer.tokens) == 7 and EOS not in answer.tokens and answer.finish_reason is FinishReason.LENGTH


def test_first_tokens_that_are_certain():
    found = answers(
        local_engine(tiny_pair(), FORMS[2]),
        [request(PROMPT, seed=s, request_id=str(s), logit_bias={0: 100}, max_tokens=3) for s in range(4)],
    )
    assert {one.tokens for one in found.values()} == {(0, 0, 0)}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"min_tokens": -1}, "min_tokens=-1; allowed: >= 0"),
        ({"min_tokens": 8, "max_tokens": 7}, "min_tokens=8; allowed: 0..7, the max_tokens"),
        ({"logit_bias": {"a": 1}}, "logit_bias contains token 'a'; allowed: token ids >= 0, < 2.*31, each once"),
        ({"logit_bias": {1: 1, "1": 2}}, "logit_bias contains token 1; allowed: token ids >= 0, < 2.*31, each once"),
        ({"logit_bias": {1: 101}}, "logit_bias contains 101 for token 1; allowed: -100 to 100"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias contains nan for token 1"),
        ({"logit_bias": [5]}, "logit_bias contains None for token 5"),
        ({"logit_bias": 5}, "logit_bias=5; allowed: an object of numbers by token id"),
        ({"logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias has 1025 tokens; allowed: at most 1024"),
    ],
)
def test_what_cannot_be_is_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        SamplingParams(**settings)


def test_what_the_vocabulary_does_not_have_is_refused():
    engine = local_engine(tiny_pair(), FORMS[2])
    with pytest.raises(ValueError, match=r"logit_bias contains token 4; allowed: 0\.\.3"):
        engine.submit(request(logit_bias={4: 1}, max_tokens=9))
    with pytest.raises(ValueError, match="min_tokens=1 where every token ends the answer; allowed: 0"):
        engine.submit(request(min_tokens=1, max_tokens=9, stop_token_ids=[0, 1, 2]))


def test_readers_of_stop_strings_agree():
    """The stop machine that runs beside the models, what the host expects, the final text and the streamed text agree
    on where an answer ends, for random strings and tokens."""
    rng, tokenizer = random.Random(1), letter_tokenizer(4)
    token_bytes = TokenBytes.of(tokenizer)
    for _ in range(250):
        least, strings = rng.randint(0, 12), rng.sample(["ab", "ca", "a", "bcb", "abab"], rng.randint(1, 3))
        rules = StopRules(SamplingParams(min_tokens=least, stop=strings, max_tokens=20, ignore_eos=True), tokenizer)
        tables = StopTables.allocate(2, tokenizer.size, token_bytes, torch.device("cpu"))
        tables.set(1, rules.machine)
        tokens, state_1, (one_1, room_1) = [], torch.tensor([START]), torch.tensor([[1], [20]])
        while len(tokens) < 20 and state_1 != DONE:
            early_1 = torch.tensor([least - len(tokens)])
            tokens.append(rng.randrange(4))
            state_1 = grow(tables, one_1, state_1, torch.tensor([tokens[-1:]]), room_1, early_1).text_A
            assert rules.state(tokens) == state_1
            assert rules.ends(tokens) == (state_1 == DONE or len(tokens) == 20)
        assert (rules.why(tokens)[0] is FinishReason.STOP_STRING) == (state_1 == DONE)
        stream, text, streamed = TextStream(rules), rules.text(tokens), ""
        size = rng.randint(1, 4)
        for first in range(0, len(tokens), size):
            streamed += stream.push(tokens[first : first + size])
        assert text.startswith(streamed) and streamed + stream.finish(text) == text
