"""Potentials: answers follow p^alpha times phi, whatever happens to a request; an error of a potential ends only its
request."""

from __future__ import annotations

import math
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import product

import pytest

from smc.api.engine_config import EngineConfig
from smc.api.request import FinishReason
from smc.api.sampling_params import POPULATIONS, SamplingParams
from smc.executor.graph_runner import StageRunner
from smc.local_engine import local_engine
from smc.potentials import Prefixes, load_potential, must_end_with, must_match, must_not_match
from smc.scheduler import potential_calls
from smc.scheduler.engine import Engine
from smc.scheduler.potential_calls import PotentialCalls
from smc.scheduler.sequence_group import SequenceGroup
from smc.scheduler.stats import MOST_SAMPLES, PotentialStats
from tests.pairwise import few
from tests.scheduler.harness import CASES, LOCKSTEP_FIRST, LOOKAHEAD_FIRST, answers, assert_empty, config_id, request
from tests.scheduler.pairs import (
    LETTERS,
    exact_law,
    far_from,
    mean_and_error,
    next_log_probs,
    tiny_pair,
    total_variation,
)
from tests.scheduler.random_histories import assert_same, live, pair, small_engine
from tests.scheduler.shared_answers import CONFIGS, EOS, LENGTH, PROMPT, equal_models, population, together

pytestmark = together
LOCKSTEP, _, LOOKAHEAD, _ = CONFIGS
ALPHA, COUNT = 1.3, 80


def log_phi(text: str, ended: bool) -> float:
    """Depends on whether the answer has ended. Answers that contain `cc` have potential 0."""
    if "cc" in text:
        return -math.inf
    return -1.2 * text.count("a") + 0.5 * text.count("b") - (2.0 if ended else 0.0)


def potential(prefixes: Prefixes) -> list[float]:
    assert len(set(zip(prefixes.tokens, prefixes.ended))) == len(prefixes.texts), "each is asked for once"
    assert prefixes.prompt in ("abc", "abbc")
    return [log_phi(text, ended) for text, ended in zip(prefixes.texts, prefixes.ended)]


def law(alpha: float) -> dict[tuple[int, ...], float]:
    """Weight p^alpha phi of every answer."""
    masses = exact_law(tiny_pair().target, PROMPT, LENGTH, EOS, alpha=alpha)
    return {tokens: mass * math.exp(log_phi(text_of(tokens), True)) for tokens, mass in masses.items()}


def text_of(tokens: Sequence[int]) -> str:
    return "".join(LETTERS[token] for token in tokens if token != EOS)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (LOCKSTEP, "distinct"),
        (LOOKAHEAD, "independent"),
    ],
    ids=["lockstep-distinct", "lookahead-independent"],
)
def test_answers_follow_the_power_times_the_potential(config: EngineConfig, kind: str):
    """By enumeration, with a potential that is 0 for some answers: E[Z-hat] is the total weight of all answers, within
    4.5 standard errors, and the particles' weights estimate the weight of each."""
    given = {"method": "smc", "particles": 8, "population": kind, "alpha": ALPHA, "potential": "phi"}
    found = population(config, COUNT, potentials={"phi": potential}, **given)
    z = [math.exp(answer.statistics.log_z) for answer in found]
    mass: Counter = Counter()
    for answer, weight in zip(found, z):
        for particle in answer.particles:
            assert "cc" not in particle.text or not particle.weight or answer.statistics.collapses
            mass[particle.tokens] += particle.weight * weight
    expected, plain = law(ALPHA), exact_law(tiny_pair().target, PROMPT, LENGTH, EOS, alpha=ALPHA)
    (mean, error), total = mean_and_error(z), sum(expected.values())
    assert abs(mean - total) < 4.5 * error
    assert abs(sum(plain.values()) - total) > 6 * error, "the test cannot tell the potential"
    near, far = (
        total_variation(normal(of), {tokens: m / sum(mass.values()) for tokens, m in mass.items()}, 1)
        for of in (expected, plain)
    )
    assert near < (0.25 if kind == "distinct" else 0.35) < far


def normal(masses: dict) -> dict:
    return {tokens: mass / sum(masses.values()) for tokens, mass in masses.items()}


@pytest.mark.parametrize("config", LOOKAHEAD_FIRST, ids=config_id)
def test_a_potential_that_says_nothing_changes_nothing(config: EngineConfig, monkeypatch):
    """A potential of constant 1. With rounds requested ahead, those rounds wait for it."""
    asked = [
        request(PROMPT, f"{kind} {seed}", seed=seed, particles=4, max_tokens=12, population=kind, logprobs=True)
        for kind in POPULATIONS
        for seed in range(4)
    ]
    expected = answers(local_engine(tiny_pair(), config), asked)
    weighed = [replace(one, params=replace(one.params, potential="same")) for one in asked]
    same = {"same": lambda prefixes: [0.0] * len(prefixes.texts)}
    for ahead in (False, True):
        monkeypatch.setattr(StageRunner, "records", ahead)
        found = answers(local_engine(tiny_pair(), config, potentials=same), weighed)
        for name, answer in found.items():
            assert_same(answer, expected[name])


@pytest.mark.parametrize("config", LOCKSTEP_FIRST, ids=config_id)
def test_potentials_stay_with_their_particles(config: EngineConfig, monkeypatch):
    """Requests in little memory are preempted, made smaller and larger, and cancelled; undisturbed requests answer as
    with plenty of memory."""
    asked = [
        request((0, 1, 1, 2), f"{kind} {seed}", seed=seed, particles=5, min_particles=2, max_tokens=24,
                population=kind, potential="phi", answer=("draw", "best")[seed % 2])
        for kind in POPULATIONS for seed in range(4)
    ]  # fmt: skip
    engine = small_engine(replace(config, pages=260), monkeypatch, ahead=True, potentials={"phi": potential})
    lives = live(engine, asked, random.Random(1), submit=1.0, interrupt=0.4, resize=0.1, cancel=0.01)
    assert lives.events["interrupted"] > 2
    plenty = replace(config, pages=20_000, max_slots=512, prefix_cache=False)
    alone = answers(local_engine(pair(), plenty, potentials={"phi": potential}), asked)
    untouched = [one.request_id for one in asked if lives.untouched(one.request_id)]
    assert untouched
    for name in untouched:
        assert_same(lives.final[name], alone[name])
    engine.check_books()


def fails(prefixes: Prefixes) -> list[float]:
    raise KeyError("no such checker")


WRONG = {
    "fails": (fails, "potential 'fails' failed (KeyError: 'no such checker')"),
    "too few": (lambda prefixes: [], "potential 'too-few' returned 0 numbers for"),
    "no number": (lambda prefixes: ["much"], "potential 'no-number' returned ['much']; allowed:"),
    "nan": (
        lambda prefixes: [math.nan] * len(prefixes.texts),
        "potential 'nan' returned nan; allowed: numbers, or -inf",
    ),
}


def test_an_error_ends_its_request_alone():
    potentials = {name.replace(" ", "-"): function for name, (function, _) in WRONG.items()}
    asked = [request(PROMPT, name, seed=1, max_tokens=9, potential=name.replace(" ", "-")) for name in WRONG]
    beside = request(PROMPT, "beside", seed=1, max_tokens=9)
    found = answers(local_engine(tiny_pair(), CASES[0], potentials=potentials), [*asked, beside])
    for name, (_, words) in WRONG.items():
        assert found[name].finish_reason is FinishReason.ERROR
        assert words in found[name].error
    assert found["beside"].tokens == answers(local_engine(tiny_pair(), CASES[0]), [beside])["beside"].tokens


def test_a_slow_potential_keeps_nobody_waiting(monkeypatch):
    """A call that exceeds its time ends its request; other requests continue meanwhile. Once `MOST_OVERDUE` calls hang,
    further calls fail at once."""
    monkeypatch.setattr(potential_calls, "MOST_OVERDUE", 2)
    end = threading.Event()

    def hangs(prefixes: Prefixes) -> list[float]:
        end.wait(60)
        return [0.0] * len(prefixes.texts)

    config = replace(CASES[1], potential_timeout=2.5)
    engine = local_engine(tiny_pair(), config, potentials={"hangs": hangs, "phi": potential})
    slow = [request(PROMPT, f"slow {i}", seed=i, max_tokens=9, potential="hangs") for i in range(2)]
    beside = [request(PROMPT, str(i), seed=i, max_tokens=9, potential="phi" if i else None) for i in range(2)]
    ended = [output.answer for output in engine.run([*slow, *beside]) if output.answer]
    assert {answer.request_id for answer in ended[:2]} == {"0", "1"}, "the others are answered first"
    assert all(answer.error == "potential 'hangs' took more than 2.5 s, its time limit" for answer in ended[2:])
    (more,) = answers(engine, [request(PROMPT, "more", max_tokens=9, potential="hangs")]).values()
    assert more.error == "potential 'hangs' does not answer: 2 calls of it have not ended"
    end.set()


def slow_engine() -> tuple[Engine, list[Prefixes], threading.Event]:
    """Return an engine, the calls of its potential "slow", which may take long, and the event that ends them."""
    end, begun = threading.Event(), []

    def slow(prefixes: Prefixes) -> list[float]:
        begun.append(prefixes)
        end.wait(120)
        return [0.0] * len(prefixes.texts)

    engine = local_engine(tiny_pair(), replace(CASES[1], potential_timeout=300), potentials={"slow": slow})
    return engine, begun, end


def test_calls_of_aborted_requests_are_within_their_time(monkeypatch):
    """They count as overdue only after their time has passed."""
    monkeypatch.setattr(potential_calls, "MOST_OVERDUE", 2)
    engine, begun, end = slow_engine()
    for i in range(2):
        engine.submit(request(PROMPT, f"aborted {i}", seed=i, max_tokens=9, potential="slow"))
    engine.submit(request(PROMPT, "preempted", seed=3, max_tokens=9, potential="slow"))
    while len(begun) < 3:
        assert not engine.step()
    engine.registry.preempt(engine.registry.groups["preempted"])
    for i in range(2):
        assert engine.abort(f"aborted {i}")
    for _ in range(3):
        engine.step()
    engine.submit(request(PROMPT, "more", seed=1, max_tokens=9, potential="slow"))
    for _ in range(3):
        assert not engine.step()
    end.set()
    found = {output.answer.request_id: output.answer for output in engine.run([]) if output.answer}
    assert set(found) == {"preempted", "more"} and not any(answer.error for answer in found.values())


def test_threads_of_aborted_requests_are_bounded(monkeypatch):
    """Long before their time has passed."""
    monkeypatch.setattr(potential_calls, "MOST_LEFT", 3)
    engine, begun, end = slow_engine()
    for i in range(3):
        engine.submit(request(PROMPT, str(i), seed=i, max_tokens=9, potential="slow"))
        while len(begun) == i:
            engine.step()
        assert engine.abort(str(i))
    engine.submit(request(PROMPT, "more", max_tokens=9, potential="slow"))
    ended, began = [], time.monotonic()
    for _ in range(12):
        ended += [output.request_id for output in engine.step()]
    assert ended == ["2"], "the request that was aborted last"
    assert len(begun) == 3 and time.monotonic() - began > 3 * potential_calls.IDLE  # steps wait, and ask nothing
    end.set()
    (more,) = [output.answer for output in engine.run([]) if output.answer]
    assert more.request_id == "more" and not more.error and len(begun) > 3
    assert_empty(engine)


def test_requests_that_wait_to_be_asked_do_not_stop_others(monkeypatch):
    monkeypatch.setattr(potential_calls, "MOST_LEFT", 1)
    engine, begun, end = slow_engine()
    engine.submit(request(PROMPT, "left", max_tokens=9, potential="slow"))
    while not begun:
        engine.step()
    assert engine.abort("left")
    engine.submit(request(PROMPT, "held", max_tokens=9, potential="slow"))
    engine.submit(request(PROMPT, "plain", max_tokens=9))
    ended: dict[str, str | None] = {}
    while "plain" not in ended:
        ended |= {output.request_id: output.answer.error for output in engine.step() if output.answer}
    assert ended == {"left": None, "plain": None} and len(begun) == 1
    end.set()
    (held,) = [output.answer for output in engine.run([]) if output.answer]
    assert held.request_id == "held" and not held.error
    assert_empty(engine)


def test_without_a_thread_for_its_potential_a_request_fails_alone(monkeypatch):
    """The operating system limits the number of threads."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    engine = local_engine(tiny_pair(), CASES[1], potentials={"phi": potential})
    monkeypatch.setattr(threading.Thread, "start", start)
    found = answers(
        engine,
        [request(PROMPT, "weighed", seed=1, max_tokens=9, potential="phi"), request(PROMPT, "plain", max_tokens=9)],
    )
    assert found["weighed"].error == "potential 'phi' could not be asked: can't start new thread"
    assert found["plain"].tokens and not found["plain"].error
    assert_empty(engine)


def test_a_step_waits_for_no_call_of_an_earlier_one(monkeypatch):
    """A step waits at most once for a call, in the step that made it, while other requests run."""
    real_wait, end = potential_calls.wait, threading.Event()
    waits: list[list[Future]] = []

    def counted_wait(futures, timeout, return_when):
        waits.append(list(futures))
        return real_wait(waits[-1], timeout, return_when)

    monkeypatch.setattr(potential_calls, "wait", counted_wait)

    def hangs(prefixes: Prefixes) -> list[float]:
        end.wait(120)
        return [0.0] * len(prefixes.texts)

    config = replace(CASES[1], potential_timeout=300)
    engine = local_engine(tiny_pair(), config, potentials={"hangs": hangs, "phi": potential})
    engine.submit(request(PROMPT, "slow", seed=1, max_tokens=9, potential="hangs"))
    beside = [request(PROMPT, str(i), seed=i, max_tokens=24, potential="phi" if i else None) for i in range(2)]
    for one in beside:
        engine.submit(one)
    answered = 0
    while answered < 2:
        answered += sum(output.answer is not None for output in engine.step())
        if len(engine.registry.groups) == 3:
            (slow,) = [call for call in engine.potentials._calls if call.name == "hangs"] or [None]
            assert slow is None or sum(slow.logphi_N in futures for futures in waits) <= 1
    assert slow is not None and not slow.logphi_N.done(), "the test has seen no slow call"
    end.set()
    list(engine.run([]))


def test_the_engine_decodes_no_text_for_a_potential(monkeypatch):
    """The threads of the calls decode the texts, the prompt's only once."""
    here, prompt = threading.current_thread(), (0, 1, 1, 2) * 10
    pair_, decoded, inside = tiny_pair(), Counter(), [False]
    real_bytes, real_follow = pair_.tokenizer.bytes_of, PotentialCalls.follow

    def bytes_of(token: int) -> bytes:
        is_here = threading.current_thread() is here
        decoded["here" if is_here and inside[0] else "elsewhere"] += is_here <= inside[0]
        return real_bytes(token)

    def follow(calls: PotentialCalls, admitted) -> list[SequenceGroup]:
        inside[0] = True
        redrawn = real_follow(calls, admitted)
        inside[0] = False
        return redrawn

    monkeypatch.setattr(pair_.tokenizer, "bytes_of", bytes_of)
    monkeypatch.setattr(PotentialCalls, "follow", follow)
    asked: list[Prefixes] = []

    def keeps(prefixes: Prefixes) -> list[float]:
        asked.append(prefixes)
        return [0.0] * len(prefixes.texts)

    engine = local_engine(pair_, CASES[1], potentials={"keeps": keeps})
    answers(engine, [request(prompt, seed=1, particles=2, max_tokens=14, ignore_eos=True, potential="keeps")])
    assert len(asked) > 3 and {prefixes.prompt for prefixes in asked} == {text_of(prompt)}
    of_answers = sum(map(len, (tokens for prefixes in asked for tokens in prefixes.tokens)))
    assert not decoded["here"] and len(prompt) < decoded["elsewhere"] < 2 * len(prompt) + 2 * of_answers


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("config", "kind", "answered", "preempted"),
    few(product(CASES, POPULATIONS, (0, 3), (False, True))),
    ids=lambda value: config_id(value) if isinstance(value, EngineConfig) else str(value),
)
def test_an_answer_cut_by_its_time_budget_has_what_was_weighed(
    config: EngineConfig, kind: str, answered: int, preempted: bool
):
    """Tokens that the potential has not scored yet appear in no answer, particle or streamed text."""
    end, clock, asked = threading.Event(), Clock(), []

    def slow(prefixes: Prefixes) -> list[float]:
        asked.append(prefixes)
        if len(asked) > answered:
            end.wait(120)
        return [0.0 if i % 2 else -1.0 for i in range(len(prefixes.texts))]

    config = replace(config, potential_timeout=300)
    for seed in range(2):
        asked.clear()
        end.clear()
        engine = local_engine(tiny_pair(), config, clock=clock, potentials={"slow": slow})
        engine.submit(
            request(PROMPT, seed=seed, particles=4, max_tokens=40, ignore_eos=True, population=kind, potential="slow",
                    time_budget=5.0, answer=("draw", "best")[seed % 2], return_particles=True)
        )  # fmt: skip
        outputs = []
        while len(asked) <= answered:
            outputs += engine.step()
        if preempted:
            engine.registry.preempt(engine.registry.groups["r"])
        clock.now += 6
        outputs += engine.step()
        end.set()
        answer = outputs[-1].answer
        assert answer.finish_reason is FinishReason.TIME_BUDGET
        weighed = {tokens[:size] for of in asked[:answered] for tokens in of.tokens for size in range(len(tokens) + 1)}
        assert answer.tokens in weighed | {()}
        assert bool(answer.tokens) == (answered > 0)
        assert {particle.tokens for particle in answer.particles} <= weighed
        assert tuple(token for output in outputs for token in output.tokens) == answer.tokens
        assert math.isfinite(answer.statistics.log_z)
        assert_empty(engine)


REDRAWN = few(product(CASES, POPULATIONS, (1, 3)))


@pytest.mark.parametrize(("config", "kind", "particles"), REDRAWN)
def test_a_round_that_leaves_no_particle_with_weight_is_drawn_again(config: EngineConfig, kind: str, particles: int):
    """Few particles, and a potential that forbids the outcome of most rounds, first tokens included: no answer, no
    streamed text and no particle with weight contains the forbidden text."""
    engine = local_engine(tiny_pair(), config, potentials={"no-a": must_not_match("a")})
    asked = [
        request(PROMPT, str(seed), seed=seed, max_tokens=14, particles=particles, population=kind, potential="no-a",
                return_particles=True)
        for seed in range(14)
    ]  # fmt: skip
    found = {}
    for output in engine.run(asked):
        assert "a" not in output.text
        if output.answer is not None:
            found[output.request_id] = output.answer
    assert_empty(engine)
    redrawn = [answer for answer in found.values() if answer.statistics.collapses]
    assert redrawn
    assert {answer.statistics.log_z for answer in redrawn} == {-math.inf}
    for answer in found.values():
        assert "a" not in answer.text and not answer.error and not answer.statistics.preemptions
        assert all("a" not in particle.text for particle in answer.particles if particle.weight)


def even(prefixes: Prefixes) -> list[float]:
    """Allows answers with an even number of `b`."""
    return [-math.inf if ended and text.count("b") % 2 else 0.0 for text, ended in zip(prefixes.texts, prefixes.ended)]


def test_what_is_drawn_again_follows_the_distribution(monkeypatch):
    """One particle, a draft equal to its target, answers of one round: given their first token, answers follow the
    target's distribution restricted to allowed answers."""
    monkeypatch.setattr(potential_calls, "MOST_REDRAWS", 100)
    config = replace(LOCKSTEP, block=2)
    found = population(config, 100, pair=equal_models(), potentials={"even": even}, particles=1, max_tokens=3,
                       potential="even", population="independent")  # fmt: skip
    assert sum(answer.statistics.collapses > 0 for answer in found) > 28
    plain, allowed = exact_law(tiny_pair().target, PROMPT, 3, EOS), Counter()
    first: Counter = Counter()
    for tokens, mass in plain.items():
        first[tokens[0]] += mass
        allowed[tokens[0]] += mass * (text_of(tokens).count("b") % 2 == 0)
    law = {
        tokens: mass * first[tokens[0]] / allowed[tokens[0]]
        for tokens, mass in plain.items()
        if text_of(tokens).count("b") % 2 == 0
    }
    assert math.isclose(sum(law.values()), 1, abs_tol=1e-9)
    assert far_from(law, [answer.tokens for answer in found]) < 4.5


def test_what_nothing_satisfies_ends():
    """After `MOST_REDRAWS` attempts the weights stay as they are and the request ends."""
    engine = local_engine(tiny_pair(), CASES[0], potentials={"never": must_match("never")})
    (found,) = answers(engine, [request(PROMPT, seed=1, max_tokens=9, particles=3, potential="never")]).values()
    tries = potential_calls.MOST_REDRAWS + 1
    assert tries <= found.statistics.collapses < 4 * tries and found.tokens


@pytest.mark.parametrize(("config", "kind"), list(zip(CASES, POPULATIONS)), ids=["lockstep", "lookahead"])
def test_a_population_without_weight_is_said(config: EngineConfig, kind: str):
    engine = local_engine(tiny_pair(), config, potentials={"never": must_match("never")})
    asked = request(PROMPT, seed=1, max_tokens=9, particles=3, population=kind, potential="never")
    (found,) = answers(engine, [asked]).values()
    assert found.statistics.log_z == -math.inf and found.statistics.collapses
    assert engine.take_stats().collapses == found.statistics.collapses
    assert found.tokens and not found.error


@pytest.mark.parametrize("config", CASES, ids=config_id)
def test_the_best_answer_is_the_likeliest_particle(config: EngineConfig):
    engine = local_engine(tiny_pair(), config, potentials={"phi": potential})
    asked = [
        request(PROMPT, f"{kind} {seed}", seed=seed, particles=5, max_tokens=6, population=kind, alpha=2.0,
                potential="phi" if seed % 2 else None, answer="best", return_particles=True)
        for kind in POPULATIONS for seed in range(6)
    ]  # fmt: skip
    found, better = answers(engine, asked), 0
    for one in asked:

        def score(tokens: tuple[int, ...], one=one) -> float:
            logp = sum(next_log_probs(tiny_pair().target, (*PROMPT, *tokens[:t]))[x] for t, x in enumerate(tokens))
            return 2.0 * float(logp) + (log_phi(text_of(tokens), True) if one.params.potential else 0.0)

        answer = found[one.request_id]
        scores = [score(particle.tokens) for particle in answer.particles if particle.weight]
        assert score(answer.tokens) == pytest.approx(max(scores), abs=1e-4)
        better += max(scores) - min(scores) > 0.1
        assert answer.logprobs is None
    assert better > 6


def test_durations_of_calls_are_bounded():
    """The newest durations of calls are kept if statistics are not read."""
    stats = PotentialStats()
    for number in range(3 * MOST_SAMPLES):
        stats.count_call(float(number))
    assert len(stats.seconds) == MOST_SAMPLES and stats.seconds[-1] == 3 * MOST_SAMPLES - 1


def test_potentials_that_ship():
    def of(potential, *texts: str, ended: bool = True) -> list[bool]:
        prefixes = Prefixes("", texts, tuple((i,) for i in range(len(texts))), (ended,) * len(texts))
        return [value == 0 for value in potential(prefixes)]

    assert of(must_match("b+"), "abba", "a") == [True, False]
    assert of(must_match("b+"), "abba", "a", ended=False) == [True, True]
    assert of(must_not_match("b+"), "abba", "a") == [False, True]
    assert of(must_not_match("b+"), "abba", "a", ended=False) == [False, True]
    assert of(must_not_match("b$"), "ab", ended=False) == [True]
    assert of(must_not_match("b$"), "ab", "aba") == [False, True]
    assert of(must_end_with(1022), "17 + 5 = 1,022", "1022 or 23", "none", "1022.0") == [True, False, False, True]
    assert of(must_end_with(22), "23", ended=False) == [True]
    with pytest.raises(ValueError, match="regular expression '\\('"):
        must_match("(")


def test_what_is_refused():
    engine = local_engine(tiny_pair(), CASES[0], potentials={"phi": potential})
    with pytest.raises(ValueError, match="potential='other'; allowed: phi"):
        engine.submit(request(PROMPT, potential="other"))
    with pytest.raises(ValueError, match="potential='phi'; allowed: none, as the configuration names no potentials"):
        local_engine(tiny_pair(), CASES[0]).submit(request(PROMPT, potential="phi"))
    for method in ("exact", "target", "draft"):
        with pytest.raises(
            ValueError, match=f"potential='phi' has no effect with method='{method}'; give method='smc'"
        ):
            SamplingParams(method=method, potential="phi")
    with pytest.raises(ValueError, match="answer='best' has no effect with method='exact'"):
        SamplingParams(method="exact", answer="best")
    with pytest.raises(ValueError, match="potential='a b'; allowed: the name of a potential"):
        SamplingParams(method="smc", potential="a b")
    for path, words in {
        "smc.no_such:thing": "cannot be imported",
        "smc.potentials:nothing": "cannot be imported",
        "smc.potentials:Potential.__doc__": "cannot be imported",
        "smc.scheduler.potential_calls:GRACE": "allowed: a callable",
        "smc.potentials": "allowed: module:function",
    }.items():
        with pytest.raises(ValueError, match=words):
            load_potential(path)
    with pytest.raises(ValueError, match="potentials has 'x': 'module'; allowed: a name, and module:function"):
        EngineConfig(potentials={"x": "module"})
    with pytest.raises(ValueError, match="potential_timeout=0; allowed: above 0"):
        EngineConfig(potential_timeout=0)
    assert (
        local_engine(tiny_pair(), EngineConfig(potentials={"x": f"{__name__}:potential"})).potentials.check("x") is None
    )
