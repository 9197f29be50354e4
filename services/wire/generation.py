"""Requests and answers between protobuf and the library. Knows nothing about who sends or receives them.

Nothing is sent twice: an update carries what is new, so the answer in the last one holds only that update's tokens and
text until whoever follows the request joins them (`services.gateway.dispatch`). `Answer.seconds` is not sent: clocks
differ."""

from __future__ import annotations

import math
from dataclasses import asdict, fields
from typing import Any

from services.pb import coordinator_pb2, generation_pb2
from services.pb.coordinator_pb2 import Submission
from services.pb.generation_pb2 import GenerateRequest
from services.wire.sampling import FINISH_REASONS, REPORTS, SAMPLING, name_of, sampling_message, sampling_settings
from smc.api.outputs import Alternatives, Answer, FinishReason, Output, Particle, Statistics, Times
from smc.api.sampling_params import SamplingParams

SECONDS_UNKNOWN = math.nan

_STATISTICS_FIELDS = tuple(field.name for field in fields(Statistics))


def to_sampling(message: GenerateRequest | Submission, **defaults: Any) -> SamplingParams:
    """The library's settings, from a message with sampling settings and reports. What is absent has the value in
    `defaults`, or else the library's own default.

    Raises ValueError naming the field, the value and what is allowed.
    """
    reports = {name: getattr(message, name) for name in REPORTS}
    return SamplingParams(**{**defaults, **sampling_settings(message.sampling), **reports})


def from_sampling(params: SamplingParams) -> dict[str, Any]:
    """Fields of a message that has sampling settings and reports. Every setting is in it, so that it means the same to
    whoever reads it.

    Raises ValueError for an integer that the message cannot hold.
    """
    sampling = sampling_message({name: getattr(params, name) for name in SAMPLING})
    return {"sampling": sampling} | {name: getattr(params, name) for name in REPORTS}


def to_finish(answer: Answer, *, statistics: bool = True) -> generation_pb2.Finish:
    """The end of an answer. The API has no `statistics` of plain decoding; between our own processes they always go
    along."""
    finish = generation_pb2.Finish(
        reason=FINISH_REASONS.get(answer.finish_reason.value, generation_pb2.FINISH_REASON_UNSPECIFIED),
        usage=generation_pb2.Usage(
            prompt_tokens=answer.prompt_tokens, completion_tokens=len(answer.tokens), cached_tokens=answer.cached_tokens
        ),
        seed=answer.seed,
        logprobs=answer.logprobs or (),
        times=generation_pb2.Times(**asdict(answer.times)),
        particles=map(_to_particle, answer.particles or ()),
        top_logprobs=map(_to_tops, answer.top_logprobs or ()),
    )
    if isinstance(answer.matched, str):
        finish.matched_string = answer.matched
    elif answer.matched is not None:
        finish.matched_token_id = answer.matched
    if statistics:
        finish.statistics.SetInParent()
        for name in _STATISTICS_FIELDS:
            setattr(finish.statistics, name, getattr(answer.statistics, name))
    return finish


def from_finish(
    finish: generation_pb2.Finish,
    request_id: str,
    tokens: tuple[int, ...],
    text: str,
    *,
    reason: FinishReason | None = None,
    error: str | None = None,
) -> Answer:
    """The answer of these tokens and this text. `reason`: how it ended, where that is none of the API's finish reasons.

    `seconds` is NaN: not known here. An answer of no tokens has `logprobs`, `top_logprobs` and `particles` None, asked
    for or not."""
    matched = finish.WhichOneof("matched")
    return Answer(
        request_id=request_id,
        tokens=tokens,
        text=text,
        finish_reason=reason or FinishReason(name_of(FINISH_REASONS, finish.reason, "finish.reason")),
        matched=getattr(finish, matched) if matched else None,
        seed=finish.seed,
        prompt_tokens=finish.usage.prompt_tokens,
        statistics=Statistics(**{name: getattr(finish.statistics, name) for name in _STATISTICS_FIELDS}),
        seconds=SECONDS_UNKNOWN,
        logprobs=tuple(finish.logprobs) or None,
        error=error,
        cached_tokens=finish.usage.cached_tokens,
        times=Times(finish.times.queue, finish.times.prefill, finish.times.decode),
        particles=tuple(map(_from_particle, finish.particles)) or None,
        top_logprobs=tuple(tuple(zip(tops.token_ids, tops.logprobs)) for tops in finish.top_logprobs) or None,
    )


def _to_particle(particle: Particle) -> generation_pb2.Particle:
    return generation_pb2.Particle(
        token_ids=particle.tokens,
        text=particle.text,
        reason=FINISH_REASONS[particle.finish_reason.value],
        weight=particle.weight,
    )


def _to_tops(tops: Alternatives) -> generation_pb2.TopLogprobs:
    tokens, logprobs = zip(*tops) if tops else ((), ())
    return generation_pb2.TopLogprobs(token_ids=tokens, logprobs=logprobs)


def _from_particle(message: generation_pb2.Particle) -> Particle:
    reason = FinishReason(name_of(FINISH_REASONS, message.reason, "particle.reason"))
    return Particle(tuple(message.token_ids), message.text, reason, message.weight)


def to_update(output: Output) -> coordinator_pb2.Update:
    """News of one request for the stream between coordinator and gateway."""
    update = coordinator_pb2.Update(request_id=output.request_id, text=output.text, token_ids=output.tokens)
    answer = output.answer
    if answer is not None:
        update.finish.CopyFrom(to_finish(answer))
        if answer.finish_reason is FinishReason.ERROR:
            update.error = answer.error or ""
        elif answer.finish_reason is FinishReason.CANCELLED:
            update.cancelled = True
    return update


def from_update(update: coordinator_pb2.Update) -> Output:
    """The news in an update. An answer in it holds the tokens and text of this update, not of those before."""
    tokens, answer = tuple(update.token_ids), None
    if update.HasField("finish"):
        ending = update.WhichOneof("ending")
        answer = from_finish(
            update.finish,
            update.request_id,
            tokens,
            update.text,
            reason={"error": FinishReason.ERROR, "cancelled": FinishReason.CANCELLED}.get(ending),
            error=update.error if ending == "error" else None,
        )
    return Output(update.request_id, tokens, update.text, answer)
