"""Conversion between the library's types and protobuf messages loses and changes nothing, for any settings and any
outputs."""

from __future__ import annotations

import asyncio
import math
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.backend import DraftUnavailable, RequestFailed, Unavailable
from services.coordinator.client import Dispatcher
from services.coordinator.messages import REQUESTS, STEPS, EngineStep, RefusedRequest, Submission
from services.pb import generation_pb2 as pb
from services.protobuf.generation import (
    FINISH_REASONS,
    REPORTS,
    SAMPLING,
    sampling_message,
    sampling_settings,
    to_finish,
    to_sampling,
)
from smc.api.limits import SCHEME_NAMES
from smc.api.request import Answer, FinishReason, Output, Particle, PromptToken, Request, Statistics
from smc.api.sampling_params import SETTINGS, Method, SamplingParams
from smc.scheduler.admission import QueueFull
from smc.scheduler.stats import EngineStats, ExactStats, PotentialStats
from smc.types import ModelRole, Numerics

POPULATIONS = SETTINGS["population"].check.names
positive = st.floats(1e-6, 1e6)
share = st.floats(0.0, 1.0)
int32 = st.integers(0, 2**31 - 1)
count = st.integers(0, 2**40)
number = st.floats(allow_nan=False)
text = st.text(st.characters(codec="utf-8"), max_size=20)
tokens = st.lists(int32, max_size=12).map(tuple)


@st.composite
def settings_of(draw) -> dict:
    """Draw any settings that the library accepts; some are left out."""
    method = draw(st.sampled_from(sorted(Method)))
    possible = {
        "temperature": positive if method == "smc" else st.just(0.0) | positive,
        "top_k": int32,
        "top_p": st.floats(1e-6, 1.0),
        "min_p": st.floats(0.0, 1.0, exclude_max=True),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "max_tokens": st.integers(1, 2**31 - 1),
        "stop": st.lists(text.filter(bool), max_size=3).map(tuple),
        "stop_token_ids": st.lists(int32, max_size=3).map(tuple),
        "ignore_eos": st.booleans(),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.01, 100),
        "logit_bias": st.dictionaries(int32, st.floats(-100, 100), max_size=3),
        "time_budget": positive,
        "bad_words": st.lists(text.filter(str.strip), max_size=3).map(tuple),
        "constraint": st.sampled_from(
            [
                {"json_schema": {"type": "string"}, "after": 7},
                {"json_object": True},
                {"regex": "a|ü"},
                {"grammar": 'start: "a"'},
                {"choice": ["a", "b"]},
            ]
        ),
    }
    if method != "draft":
        possible |= {"guidance_scale": st.floats(1.0, 1e3)}
    if method in ("smc", "exact"):
        possible |= {"particles": st.integers(1, 64)}
    if method == "exact" and draw(st.booleans()):
        return {"method": method, "verification": "rejection", "draft_temperature": draw(positive)}
    if method == "smc":
        population = draw(st.sampled_from(POPULATIONS))
        possible |= {"population": st.just(population), "draft_temperature": positive, "alpha": positive}
        if population == "independent":
            possible |= {"ess_threshold": share, "resampling": st.sampled_from(SCHEME_NAMES)}
    chosen = {"method": method} | {name: draw(values) for name, values in possible.items() if draw(st.booleans())}
    if "constraint" in chosen:
        chosen.pop("ignore_eos", None)
        if method == "smc" and draw(st.booleans()):
            chosen["constraint_scope"] = draw(st.sampled_from(["token", "answer"]))
    if draw(st.booleans()):
        chosen["min_tokens"] = draw(st.integers(0, chosen.get("max_tokens", 256)))
    if method == "smc" and draw(st.booleans()):
        chosen["min_particles"] = draw(st.integers(1, chosen.get("particles", 8)))
    return chosen


@given(settings_of(), st.booleans(), st.booleans(), st.sampled_from([None, 0, 3]))
def test_settings_round_trip(settings, logprobs, particles, prompt):
    logprobs = logprobs and settings["method"] != "draft"
    # These are not available with penalties and constraints.
    top = 0 if any(name.endswith(("_penalty", "constraint", "bad_words")) for name in settings) else 7 * logprobs
    reports = {"logprobs": logprobs, "top_logprobs": top, "return_particles": particles}
    reports["prompt_logprobs"] = None if settings["method"] == "draft" else prompt
    params = SamplingParams(**settings, **reports)
    message = pb.GenerateRequest(sampling=sampling_message(settings), **reports)
    assert to_sampling(sent(message)) == params, "what is left out has the library's default"
    request = Request("7", (1, 2**17), params, "salt", 0.5, (3,) if prompt else None, -7)
    assert REQUESTS.decode(REQUESTS.encode(Submission(request))) == Submission(request)


def test_a_number_written_as_a_large_integer_round_trips():
    """A body may hold 10^30 where a number is due; messages hold integers of 64 bits."""
    request = Request("7", (1,), SamplingParams(time_budget=10**30))
    assert REQUESTS.decode(REQUESTS.encode(Submission(request))) == Submission(request)


def sent(message):
    return type(message).FromString(message.SerializeToString())


def test_every_sampling_field_has_its_line_in_the_messages():
    """The messages have a field for every sampling setting, and no others."""
    assert set(pb.SamplingParams.DESCRIPTOR.fields_by_name) == set(SAMPLING)
    beside = {"request_id", "sampling", "cache_salt", "priority", "text", "token_ids", "chat", "negative_prompt"}
    assert set(pb.GenerateRequest.DESCRIPTOR.fields_by_name) - beside == set(REPORTS)
    assert [field.name for field in fields(SamplingParams)] == list(SETTINGS)


@pytest.mark.parametrize(
    ("name", "enum"),
    [
        ("method", pb.Method),
        ("population", pb.Population),
        ("resampling", pb.Resampling),
        ("verification", pb.Verification),
    ],
)
def test_every_choice_of_a_field_has_its_number(name, enum):
    """Every choice of a setting has a number in its enum and is read back from it."""
    numbers = [getattr(sampling_message({name: choice}), name) for choice in SETTINGS[name].check.names]
    assert sorted(numbers) == [number for number in enum.values() if number]
    assert [sampling_settings(pb.SamplingParams(**{name: number}))[name] for number in numbers] == list(
        SETTINGS[name].check.names
    )


def test_finish_reasons_and_statistics_are_complete():
    """The messages have every finish reason with which an answer can end, and every field of the statistics."""
    assert set(FINISH_REASONS) == set(FinishReason) - {FinishReason.ERROR, FinishReason.CANCELLED}
    assert sorted(FINISH_REASONS.values()) == [number for number in pb.FinishReason.values() if number]
    assert set(pb.Statistics.DESCRIPTOR.fields_by_name) == {field.name for field in fields(Statistics)}


def test_defaults_stand_in_for_what_is_absent():
    def read(**given):
        defaults = {"max_tokens": 7} if given.pop("has_default", False) else {}
        return to_sampling(pb.GenerateRequest(sampling=pb.SamplingParams(**given)), **defaults)

    assert read(has_default=True).max_tokens == 7
    assert read(has_default=True, max_tokens=3).max_tokens == 3
    assert read() == SamplingParams() == to_sampling(pb.GenerateRequest())
    assert read().method is Method.EXACT is read(temperature=0.0).method
    assert read(method=pb.METHOD_SMC, ess_threshold=0.7).population == "independent"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"particles": 2**31}, "particles=2147483648; allowed: a 32-bit integer"),
        ({"particles": 1.5}, "particles=1.5; allowed: a 32-bit integer"),
        ({"temperature": "hot"}, "temperature='hot'; allowed: a number"),
        ({"seed": 2**63}, "seed=9223372036854775808; allowed: a 64-bit integer"),
        ({"stop": "text"}, "stop='text'; allowed: a list"),
        ({"stop": ["\ud800"]}, "stop=.*valid Unicode"),
        ({"stop_token_ids": [1, 2**40]}, "stop_token_ids=.*a 32-bit integer"),
        ({"logit_bias": {2**31: 1}}, "logit_bias=.*allowed: numbers by token id"),
        ({"logit_bias": 3}, "logit_bias=3; allowed: numbers by token id"),
        ({"method": "beam"}, "method='beam'; allowed: smc, exact, target, draft"),
        ({"population": "mixed"}, "population='mixed'; allowed: distinct, independent"),
        ({"resampling": "none"}, "resampling='none'; allowed: systematic"),
    ],
)
def test_what_a_message_cannot_hold(settings, message):
    """Settings of a wrong type or out of the message's range raise ValueError naming the setting."""
    with pytest.raises(ValueError, match=message):
        sampling_message(settings)


def test_unknown_setting():
    """An unknown setting raises TypeError; known ones that are None are left out."""
    with pytest.raises(TypeError, match="beams is not a sampling setting; allowed: method, max_tokens"):
        sampling_message({"beams": 3})
    assert sampling_message({"particles": None, "stop": None}) == pb.SamplingParams()


statistics = st.builds(
    Statistics,
    particles=st.integers(1, 64),
    rounds=int32,
    resamples=int32,
    collapses=int32,
    particles_left=st.integers(1, 64),
    preemptions=int32,
    mean_ess=number,
    min_ess=number,
    log_z=number,
    draft_tokens=count,
    target_tokens=count,
    committed_lag=number,
    accepted_per_round=number,
    hits=int32,
    misses=int32,
    alone_rounds=int32,
    mean_rows=number,
    draft_exponent=number,
)


particles = st.builds(
    Particle,
    tokens,
    text,
    st.sampled_from([reason for reason in FinishReason if reason.value in FINISH_REASONS]),
    st.floats(0, 1),
)


@st.composite
def outputs(draw) -> Output:
    """Draw an output that holds everything generated for a request, with or without its end."""
    ids, words = draw(tokens), draw(text)
    answer, logprob = None, st.one_of(st.just(math.nan), st.floats(max_value=0, width=32))
    if draw(st.booleans()):
        reason = draw(st.sampled_from(FinishReason))
        answer = Answer(
            request_id="id",
            tokens=ids,
            text=words,
            finish_reason=reason,
            matched=draw(st.one_of(st.none(), int32, text)),
            seed=draw(st.integers(-(2**63), 2**63 - 1)),
            prompt_tokens=draw(int32),
            statistics=draw(statistics),
            seconds=1.0,
            top_logprobs=tuple(tuple((token, draw(logprob)) for token in ids[:at]) for at, _ in enumerate(ids)) or None,
            error=draw(text) if reason is FinishReason.ERROR else None,
            cached_tokens=draw(int32),
            particles=tuple(draw(st.lists(particles, min_size=1, max_size=3))) if draw(st.booleans()) else None,
            prompt_logprobs=draw(
                st.one_of(
                    st.none(),
                    st.just(
                        tuple(
                            PromptToken(draw(logprob), token, tuple((one, draw(logprob)) for one in ids[:at]))
                            for at, token in enumerate(ids)
                        )
                    ),
                )
            ),
        )
    logprobs = tuple(draw(logprob) for _ in ids) if draw(st.booleans()) else ()
    if answer is not None:
        answer = replace(answer, logprobs=logprobs or None)
    return Output("id", ids, words, answer, logprobs)


def same(found: Output, expected: Output) -> bool:
    """Whether two outputs are equal. NaN equals itself; the seconds are not sent, so they are not compared."""
    if expected.answer is not None:
        assert math.isnan(found.answer.seconds)
        expected = replace(expected, answer=replace(expected.answer, seconds=found.answer.seconds))
    return repr(found) == repr(expected)


def over_the_stream(step: EngineStep) -> EngineStep:
    """Return a step as the gateway gets it."""
    return STEPS.decode(STEPS.encode(step.to_send()))


@given(outputs())
def test_outputs_round_trip(output):
    (found,) = over_the_stream(EngineStep([output])).outputs
    assert same(found, output)


@given(outputs().filter(lambda o: o.answer and o.answer.finish_reason.value in FINISH_REASONS))
def test_the_end_of_an_answer_round_trips(output):
    answer = output.answer
    finish = sent(to_finish(answer, statistics=True))
    assert (finish.usage.completion_tokens, finish.usage.cached_tokens) == (len(answer.tokens), answer.cached_tokens)
    assert repr(tuple(finish.logprobs)) == repr(answer.logprobs or ())  # NaN included
    assert not to_finish(answer, statistics=False).HasField("statistics")


PLAIN = [f for f in fields(EngineStats) if "list" not in f.type and f.name not in ("spec", "potentials")]
by_side = st.dictionaries(st.sampled_from(("draft", "target")), count)


@given(
    st.builds(
        EngineStats,
        **{f.name: by_side if f.type.startswith("dict") else int32 for f in PLAIN if f.name != "numerics"},
        numerics=st.dictionaries(st.sampled_from(ModelRole), st.sampled_from(Numerics)),
    )
)
def test_the_state_of_the_engine_round_trips(stats):
    """Engine statistics round-trip. Entries that a model lacks stay absent: leaked pages are unknown while requests
    run."""
    stats.ess_shares, stats.committed_lags = [0.5, 1.0], [0, 7]
    stats.exact = {"walk": ExactStats(1, 2, 3, [3, 2, 0], 4, 5, 6), "rejection": ExactStats(7, 8, 9, [1], 10, 11, 12)}
    stats.potentials = PotentialStats([0.25, 2.0], 1, 2)
    assert over_the_stream(EngineStep(stats=stats)).stats == stats


@pytest.mark.parametrize("kind", [ValueError, QueueFull, RequestFailed, DraftUnavailable, Unavailable])
def test_refusals_and_the_loss_of_the_draft_round_trip(kind):
    step = over_the_stream(EngineStep(refusals=[RefusedRequest.of("1", kind("the draft is lost"))], lost_draft=7))
    (refusal,) = step.refusals
    assert step.lost_draft == 7 and refusal.request_id == "1"
    assert type(refusal.error) is kind and str(refusal.error) == "the draft is lost"


class Port:
    """Takes submissions and answers with the messages that a remote coordinator would send."""

    def __init__(self, pieces: list[Output]) -> None:
        self.pieces, self.aborted = pieces, []

    def submit(self, request: Request) -> None:
        steps = [EngineStep([replace(piece, request_id=request.request_id)]) for piece in self.pieces]
        loop = asyncio.get_running_loop()
        for step in map(over_the_stream, steps):
            loop.call_soon(self.dispatcher.deliver, step)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


def follow(pieces: list[Output]) -> list[Output]:
    async def work() -> list[Output]:
        port = Port(pieces)
        port.dispatcher = Dispatcher(port)
        found = [output async for output in port.dispatcher.generate(Request("mine", (1,)))]
        assert not port.dispatcher.requests and not port.aborted
        return found

    return asyncio.run(work())


ENDED = Answer("id", (1, 2, 3), "abc", FinishReason.EOS, 3, 5, 7, Statistics(4), 1.0)


def test_an_answer_is_whole_again_where_it_is_followed():
    """An answer is complete whatever the pieces in which it arrived. It has the caller's own request id and a time
    measured in the gateway."""
    pieces = [Output("id", (1,), "a", logprobs=(-1.0,)), Output("id", (2,), "b", logprobs=(-2.0,))]
    found = follow([*pieces, Output("id", (3,), "c", replace(ENDED, logprobs=(-3.0,)), (-3.0,))])
    assert "".join(output.text for output in found) == "abc" and {output.request_id for output in found} == {"mine"}
    answer = found[-1].answer
    assert sum((output.logprobs for output in found), ()) == (-1.0, -2.0, -3.0)
    assert (
        replace(answer, seconds=1.0) == replace(ENDED, request_id="mine", logprobs=(-1.0, -2.0, -3.0))
        and 0 <= answer.seconds < 1
    )


def test_error_end_raises():
    """An answer that ended with an error raises RequestFailed in the gateway."""
    with pytest.raises(RequestFailed, match="NaN"):
        follow(
            [Output("id", (), "", replace(ENDED, tokens=(), text="", finish_reason=FinishReason.ERROR, error="NaN"))]
        )


def test_a_complete_answer_is_delivered_whatever_comes_after_it():
    """A complete answer is delivered even if the worker group dies before its caller has read it."""

    async def work() -> list[Output]:
        port = Port([])
        port.dispatcher = Dispatcher(port)
        news = port.dispatcher.generate(Request("mine", (1,)))
        asked = asyncio.create_task(anext(news))
        await asyncio.sleep(0)
        port.dispatcher.deliver(EngineStep([Output("1", (1, 2, 3), "abc", ENDED)]))
        port.dispatcher.fail_all(Unavailable("the coordinator is gone"))
        return [await asked, *[output async for output in news]]

    (output,) = asyncio.run(work())
    assert output.answer.text == "abc"
