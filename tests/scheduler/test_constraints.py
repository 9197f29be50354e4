"""Constraints: answers are texts that the constraint allows, and they follow the requested distribution."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections import Counter
from dataclasses import replace
from functools import cache

import llguidance
import pytest
import torch

from smc.api.engine_config import EngineConfig
from smc.api.request import FinishReason
from smc.api.sampling_params import SamplingParams
from smc.executor.graph_runner import StageRunner
from smc.local_engine import local_engine
from tests.scheduler.harness import CASES, LOCKSTEP_FIRST, LOOKAHEAD_FIRST, answers, config_id, processed, request
from tests.scheduler.pairs import LETTERS, law_of, next_log_probs, target_logits_after, tiny_pair, total_variation
from tests.scheduler.random_histories import answers_with_plenty_of_memory, assert_same, live, small_engine
from tests.scheduler.shared_answers import CONFIGS

PROMPT, EOS = (0, 1, 1, 2), 3
METHODS = {
    "target": {"method": "target"},
    "exact": {"method": "exact", "particles": 3},
    "rejection": {"method": "exact", "particles": 2, "verification": "rejection"},
    "draft": {"method": "draft"},
    "distinct": {"method": "smc", "particles": 3},
    "independent": {"method": "smc", "particles": 3, "population": "independent"},
    "distinct answer": {"method": "smc", "particles": 3, "constraint_scope": "answer"},
    "independent answer": {"method": "smc", "particles": 3, "population": "independent", "constraint_scope": "answer"},
}
EXPRESSIONS = ["a(bc)*", "(a|bb){3,6}", "abc|aab|cc", "[bc]*a?"]


@cache
def texts(expression: str, longest: int) -> tuple[frozenset[str], frozenset[str]]:
    """All texts of at most `longest` letters that match, and all their prefixes."""
    every = ("".join(text) for n in range(longest + 1) for text in itertools.product("abc", repeat=n))
    whole = frozenset(text for text in every if re.fullmatch(expression, text))
    return whole, frozenset(text[:n] for text in whole for n in range(len(text) + 1))


def allowed(expression: str, answer: tuple[int, ...], longest: int = 10) -> list[int]:
    """Tokens that may follow `answer`, found by trying all texts."""
    whole, begun = texts(expression, longest)
    text = "".join(LETTERS[token] for token in answer)
    return [t for t in range(3) if text + LETTERS[t] in begun] + [EOS] * (text in whole)


@pytest.mark.parametrize("config", LOOKAHEAD_FIRST, ids=config_id)
def test_answers_are_allowed_and_exact_ones_those_of_the_target(config: EngineConfig):
    """By every method. Requests without a constraint in the same batch get the same answers as without the others."""
    more, seeds = {"max_tokens": 9, "logprobs": True}, 1
    plain = [name for name in METHODS if "answer" not in name and name != "draft"]
    requests = [
        request(
            PROMPT,
            f"{name} {i} {seed}",
            seed=seed,
            constraint={"regex": expression},
            **METHODS[name],
            **{k: v for k, v in more.items() if (k, name) != ("logprobs", "draft")},
        )
        for name in METHODS
        for i, expression in enumerate(EXPRESSIONS)
        for seed in range(seeds)
    ]
    beside = [
        request(PROMPT, f"{name} beside {s}", seed=s, **more, **METHODS[name]) for name in plain for s in range(2)
    ]
    found = answers(local_engine(tiny_pair(), processed(config)), [*requests, *beside])
    for one in requests:
        name, i, _ = one.request_id.rsplit(" ", 2)
        answer, expression = found[one.request_id], EXPRESSIONS[int(i)]
        for t, token in enumerate(answer.tokens):
            assert token in allowed(expression, answer.tokens[:t])
        assert answer.finish_reason is FinishReason.EOS or len(answer.tokens) == 9
        if name in ("target", "exact", "distinct", "independent"):
            law = [law_after(expression, answer.tokens[:t])[token] for t, token in enumerate(answer.tokens)]
            assert answer.logprobs == pytest.approx(law, abs=2e-5)
        if name.endswith(" answer"):
            law = [
                next_log_probs(tiny_pair().target, (*PROMPT, *answer.tokens[:t]))[x].item()
                for t, x in enumerate(answer.tokens)
            ]
            assert answer.logprobs == pytest.approx(law, abs=2e-5)
        if name == "exact":
            assert answer.tokens == found[one.request_id.replace("exact", "target")].tokens
    alone = answers(local_engine(tiny_pair(), processed(config)), beside)
    assert all(alone[one.request_id].tokens == found[one.request_id].tokens for one in beside)


@pytest.mark.parametrize("config", LOOKAHEAD_FIRST, ids=config_id)
def test_rounds_as_on_gpus(config: EngineConfig, monkeypatch):
    """Answers stay the same when a round is launched before the last has been read, where trees of exact decoding have
    masks only in the first step of the draft. Those by rejection do not depend on which other requests need further
    masks."""
    requests = [
        request(PROMPT, f"{n} {i} {s}", seed=s, max_tokens=9, constraint={"regex": expression}, **METHODS[n])
        for n in ("target", "exact", "rejection", "independent answer")
        for i, expression in enumerate(EXPRESSIONS[:2])
        for s in range(2)
    ]
    expected = answers(local_engine(tiny_pair(), config), requests)
    monkeypatch.setattr(StageRunner, "records", True)
    found = answers(local_engine(tiny_pair(), config), requests)
    for one in requests:
        assert found[one.request_id].tokens == expected[one.request_id].tokens
        for t, token in enumerate(found[one.request_id].tokens):
            assert token in allowed(one.params.constraint.text, found[one.request_id].tokens[:t])


def law_after(expression: str, answer: tuple[int, ...]) -> list[float]:
    """log p [V] of the target after an answer, renormalised over the allowed tokens."""
    logp_V = next_log_probs(tiny_pair().target, (*PROMPT, *answer))
    mask_V = torch.tensor([t in allowed(expression, answer) for t in range(len(logp_V))])
    return logp_V.where(mask_V, -torch.inf).log_softmax(-1).tolist()


LAW = {
    "method": "smc",
    "constraint": {"regex": "acb|b[abc]*|c"},
    "max_tokens": 3,
    "particles": 4,
    "return_particles": True,
}
COUNT = 110
LOCKSTEP, _, LOOKAHEAD, _ = CONFIGS


def law_given(by_answer: bool, alpha: float = 1.0) -> dict[tuple[int, ...], float]:
    """Probability of every answer, by enumeration. With `by_answer` the probability is the target's own, so the sum is
    below 1."""
    expression = LAW["constraint"]["regex"]

    def log_probs(prefix: tuple[int, ...]) -> list[float]:
        if not by_answer:
            return law_after(expression, prefix)
        logp_V, may = next_log_probs(tiny_pair().target, (*PROMPT, *prefix)), allowed(expression, prefix, 6)
        return [logp_V[t].item() if t in may else -math.inf for t in range(4)]

    return {answer: mass for answer, mass in law_of(log_probs, LAW["max_tokens"], EOS, alpha=alpha).items() if mass > 0}


@pytest.mark.parametrize(
    ("config", "population", "law", "alpha"),
    [
        (LOOKAHEAD, "distinct", "token", 1.0),
        (LOCKSTEP, "distinct", "answer", 1.0),
        (LOOKAHEAD, "independent", "answer", 1.0),
        pytest.param(LOCKSTEP, "independent", "answer", 2.0, marks=pytest.mark.slow),
    ],
)
def test_weighted_answers_have_the_law_that_was_asked_for(config, population, law, alpha):
    """Z-hat and the particles' weights estimate the probability of every answer without bias. With
    `constraint_scope=answer` these are probabilities under the target, whose sum is below 1. The distance is noise,
    smaller than that between the two distributions."""
    settings = LAW | {"constraint_scope": law, "population": population, "alpha": alpha}
    found = answers(
        local_engine(tiny_pair(), config), [request(PROMPT, str(s), seed=s, **settings) for s in range(COUNT)]
    )
    mass: Counter = Counter()
    z = [math.exp(answer.statistics.log_z) for answer in found.values()]
    for answer, weight in zip(found.values(), z):
        for particle in answer.particles:
            mass[particle.tokens] += particle.weight * weight
    expected, other = law_given(law == "answer", alpha), law_given(law != "answer", alpha)
    total, error = sum(expected.values()), 4.5 * torch.tensor(z).std().item() / COUNT**0.5
    assert abs(sum(z) / COUNT - total) < error + 1e-4
    if law == "answer":
        assert total < 0.6
    expected, other, mass = (normal(values) for values in (expected, other, mass))
    assert total_variation(expected, mass, 1) < 0.15
    if alpha == 1:
        assert total_variation(other, mass, 1) > 0.2


def normal(law: dict) -> dict:
    total = sum(law.values())
    return {answer: mass / total for answer, mass in law.items()}


@pytest.mark.parametrize("config", LOCKSTEP_FIRST, ids=config_id)
def test_truncation_that_leaves_nothing_allowed(config):
    """Top-k keeps one token, which the constraint forbids: answers obey the constraint nevertheless, in both scopes."""
    requests = [
        request(PROMPT, f"{law} {p} {s}", seed=s, top_k=1, max_tokens=6, population=p, particles=3,
                constraint={"regex": "(aac|bbc|cca){1,3}"}, constraint_scope=law)
        for law in ("token", "answer") for p in ("distinct", "independent") for s in range(4)
    ]  # fmt: skip
    found = answers(local_engine(tiny_pair(), config), requests)
    for answer in found.values():
        assert answer.finish_reason is FinishReason.EOS or len(answer.tokens) == 6
        assert all(t in allowed("(aac|bbc|cca){1,3}", answer.tokens[:i]) for i, t in enumerate(answer.tokens))


@pytest.mark.parametrize("config", LOOKAHEAD_FIRST, ids=config_id)
def test_other_settings_beside_a_constraint(config: EngineConfig):
    """Constraints with random biases, penalties, temperatures, truncations, stop strings and `min_tokens`: every token
    is allowed, exact answers equal those of the target, and greedy answers equal a slow reference computed token by
    token."""
    dice = random.Random(5)
    requests = []
    for i in range(18):
        law = {
            "constraint": {"regex": dice.choice(EXPRESSIONS)},
            "seed": dice.randrange(100),
            "max_tokens": dice.randint(1, 9),
            "temperature": dice.choice([0, 0.7, 1, 1.5]),
            "logit_bias": dice.choice([{}, {0: 1.5, EOS: -2.0}]),
            "presence_penalty": dice.choice([0, 0.9]),
            "top_k": dice.choice([0, 0, 2]),
            "stop": dice.choice([(), ("cb",)]),
            "logprobs": dice.random() < 0.5,
            "guidance_scale": dice.choice([1, 1, 1.7]),
        }
        law["min_tokens"] = dice.choice([0, min(3, law["max_tokens"])])
        requests += [request(PROMPT, f"{name} {i}", **law, **METHODS[name]) for name in ("target", "exact")]
    found = answers(local_engine(tiny_pair(), config), requests)
    assert {answer.finish_reason for answer in found.values()} >= {FinishReason.EOS, FinishReason.STOP_STRING}
    for one in requests:
        answer, params = found[one.request_id], one.params
        expression = params.constraint.text
        for t, token in enumerate(answer.tokens):
            text = tuple(x for x in answer.tokens[:t] if x != EOS)
            assert token in allowed(expression, text)
            if params.min_tokens > t and token == EOS:
                # Only the end is allowed, and a complete text stays complete.
                assert allowed(expression, text) == [EOS] or len(text) < t
        assert answer.tokens == found[one.request_id.replace("exact", "target")].tokens
        if params.temperature == 0 and not params.guided and params.top_k == 0:
            for t, token in enumerate(answer.tokens):
                logits_V = target_logits_after((*PROMPT, *answer.tokens[:t])).clone()
                for other in range(4):
                    logits_V[other] += dict(params.logit_bias).get(other, 0)
                    logits_V[other] -= params.presence_penalty * (other in answer.tokens[:t])
                text = tuple(x for x in answer.tokens[:t] if x != EOS)
                may = allowed(expression, text) if len(text) == t else [EOS]
                may = [x for x in may if x != EOS or t >= params.min_tokens] or may
                assert token == max(may, key=lambda other: logits_V[other])


@pytest.mark.parametrize("config", LOCKSTEP_FIRST, ids=config_id)
def test_constraints_survive_preemption(config: EngineConfig, monkeypatch):
    """The constraint's state is rebuilt from a row's tokens when it resumes: preempted requests in little memory answer
    as with plenty of memory."""
    law = {"max_tokens": 30, "particles": 4, "constraint": {"regex": "(ab*c|cba?){8,}"}}
    requests = [
        request(PROMPT, f"{method} {seed}", seed=seed, method=method, **law)
        for method in ("exact", "smc")
        for seed in range(2)
    ]
    engine = small_engine(replace(config, pages=200, prefill_chunk=16), monkeypatch, ahead=True)
    lives = live(engine, requests, random.Random(0), submit=1.0, interrupt=0.3)
    assert lives.events["interrupted"] > 6
    expected = answers_with_plenty_of_memory(config, requests)
    for one in requests:
        assert_same(lives.final[one.request_id], expected[one.request_id])


@pytest.mark.parametrize("config", LOCKSTEP_FIRST, ids=config_id)
def test_a_constraint_begins_after_reasoning(config: EngineConfig):
    """Token 2 ends the reasoning; EOS must not."""
    constraint = {"regex": "(ab){2,4}", "after": 2}
    requests = [
        request(PROMPT, f"{name} {s}", seed=s, max_tokens=30, constraint=constraint, **METHODS[name])
        for name in ("target", "exact", "distinct", "independent answer")
        for s in range(4)
    ]
    found = answers(local_engine(tiny_pair(), config), requests)
    ended = 0
    for one in requests:
        answer = found[one.request_id]
        reasoning, mark, rest = answer.text.partition("c")
        assert EOS not in answer.tokens[: len(reasoning) + 1]
        if answer.finish_reason is FinishReason.EOS:
            ended += 1
            assert mark and re.fullmatch("(ab){2,4}", rest)
        assert answer.tokens == found[one.request_id.replace("exact", "target")].tokens
    assert ended > 8


@pytest.mark.parametrize("config", LOOKAHEAD_FIRST, ids=config_id)
def test_bad_words_are_not_written(config: EngineConfig):
    """`logprobs` equal a token-by-token reference. Bad words are written where a constraint leaves no alternative."""
    words, bad = ("ab", "c", "bba"), ((0, 1), (2,), (1, 1, 0))
    names = ("target", "exact", "rejection", "distinct", "independent")
    requests = [
        request(
            PROMPT, f"{n} {s}", seed=s, max_tokens=12, bad_words=words, ignore_eos=True, logprobs=True, **METHODS[n]
        )
        for n in names
        for s in range(3)
    ]
    forced = request(
        PROMPT, "forced", seed=1, max_tokens=9, bad_words=words, constraint={"regex": "abc"}, **METHODS["exact"]
    )
    found = answers(local_engine(tiny_pair(), processed(config)), [*requests, forced])
    for one in requests:
        answer = found[one.request_id]
        written = "".join((*LETTERS[:3], ".")[token] for token in answer.tokens)
        assert not any(word in written for word in words)
        expected = []
        for t, token in enumerate(answer.tokens):
            # End tokens have no text, so a word continues after them.
            before = tuple(x for x in answer.tokens[:t] if x != EOS)
            out = [
                word[-1]
                for word in bad
                if before[len(before) - len(word) + 1 :] == word[:-1] and len(word) <= len(before) + 1
            ]
            mask_V = torch.tensor([token not in out for token in range(4)])
            logp_V = next_log_probs(tiny_pair().target, (*PROMPT, *answer.tokens[:t])).where(mask_V, -torch.inf)
            expected.append(logp_V.log_softmax(-1)[token].item())
        assert answer.logprobs == pytest.approx(expected, abs=2e-5)
        assert answer.tokens == found[one.request_id.replace("exact", "target")].tokens
    assert found["forced"].text == "abc"


@pytest.mark.parametrize("how", ["target", "exact", "distinct"])
def test_a_constraint_that_becomes_too_complex_ends_its_request_alone(how: str, monkeypatch):
    limits = llguidance.LLParserLimits(step_max_items=8, verbose_errors=False)
    monkeypatch.setattr("smc.constraints.LIMITS", limits)
    grammar = (
        'start: ("a" | "c") ("a" | "c") ("a" | "b" | "c") x "b"\nx: | "c" y x\ny: "c" | "b" y | '
        + " | ".join(f'"{t}" x y' for t in "abc")
        + f"\n// {how}"
    )
    asked = request(PROMPT, "complex", max_tokens=30, seed=1, constraint={"grammar": grammar}, **METHODS[how])
    beside = request(PROMPT, "beside", max_tokens=9, seed=1, **METHODS[how])
    found = answers(local_engine(tiny_pair(), CASES[0]), [asked, beside])
    assert found["complex"].finish_reason is FinishReason.ERROR
    assert found["complex"].error.startswith("constraint: the grammar allows too many alternatives after ")
    assert found["complex"].caller_error
    assert found["beside"].tokens == answers(local_engine(tiny_pair(), CASES[0]), [beside])["beside"].tokens


@pytest.mark.slow
def test_a_draft_that_is_lost_changes_nothing():
    config = CASES[1]
    requests = [
        request(PROMPT, str(s), seed=s, max_tokens=24, method="exact", constraint={"regex": "(ab*c|cba?){6,}"})
        for s in range(3)
    ]
    expected = answers(local_engine(tiny_pair(), config), requests)
    engine = local_engine(tiny_pair(), config)
    for one in requests:
        engine.submit(one)
    found = {}
    for step in itertools.count():
        if step == 3:
            assert not engine.detach_draft()
        elif step == 8:
            engine.attach_draft(engine.memory.capacity["draft"])
        found |= {output.request_id: output.answer for output in engine.step() if output.answer}
        if engine.idle:
            break
    assert {name: answer.tokens for name, answer in found.items()} == {n: a.tokens for n, a in expected.items()}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"constraint": {"regex": "("}}, r"constraint\.regex: unclosed group"),
        (
            {"constraint": {"json_schema": {"type": "strin"}}},
            r"constraint\.json_schema: Invalid type: strin",
        ),
        ({"constraint": {"grammar": 'start: "a" b'}}, r"constraint\.grammar: .*unknown name"),
        ({"constraint": {"regex": "a", "after": 4}}, r"constraint: after=4; allowed: 0\.\.3"),
    ],
)
def test_constraints_that_cannot_be_followed_are_refused_before_they_are_queued(given: dict, message: str):
    engine = local_engine(tiny_pair(), CASES[0])
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        engine.submit(request(PROMPT, **given))
    assert engine.idle


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"constraint": "a"}, "constraint: 'a'; allowed: an object with one of json_schema"),
        ({"constraint": {"regex": "a", "choice": ["a"]}}, "constraint: it has 'regex', 'choice'; allowed"),
        ({"constraint": {"json": "a"}}, "constraint: it has 'json'; allowed"),
        ({"constraint": {"regex": ""}}, r"constraint\.regex: ''; allowed: a regex"),
        ({"constraint": {"choice": []}}, r"constraint\.choice: '\[\]'; allowed: a list of non-empty strings"),
        ({"constraint": {"json_object": False}}, r"constraint\.json_object: False; allowed: true"),
        (
            {"constraint": {"regex": "a" * (64 << 10) + "b"}},
            r"constraint\.regex: it has 65537 bytes; allowed: at most 65536",
        ),
        ({"constraint": {"regex": "a"}, "ignore_eos": True}, "ignore_eos=True is not available with a constraint"),
        (
            {"constraint": {"regex": "a"}, "logprobs": True, "top_logprobs": 1},
            "top_logprobs=1 is not available with a constraint",
        ),
        ({"bad_words": [" "]}, "bad_words contains ' '; allowed: strings that are not blank"),
        ({"method": "smc", "constraint_scope": "answer"}, "constraint_scope='answer' has no effect with no constraint"),
        (
            {"constraint": {"regex": "a"}, "constraint_scope": "token", "method": "exact"},
            "constraint_scope='token' has no eff",
        ),
    ],
)
def test_values_that_are_refused(given: dict, message: str):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**given)


@pytest.mark.parametrize("method", ["exact", "target", "draft"])
def test_times_of_masks_are_counted_for_every_method(method):
    engine = local_engine(tiny_pair(), CASES[0])
    answers(engine, [request(PROMPT, method, max_tokens=6, constraint={"regex": "[abc]+"}, **METHODS[method])])
    assert engine.take_stats().mask_seconds
