"""`vllm.grpc.engine.VllmEngine`: vLLM's engine protocol, with the same limits and checks as `smc.v1`. Knows nothing
about the router that calls it.

Fields that this service does not support are refused unless set to their no-op value. The protocol has few optional
fields: a number that is 0 counts as absent. Answers are token ids, without text."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import io
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc
from smg_grpc_proto.generated import common_pb2

from services.backend import Unimplemented
from services.gateway.request_handler import ApiServer, RequestHandler
from services.openai.dialects import OPENAI_FINISH
from services.openai.requests import LONGEST, MAX_ANSWERS, seeds_of
from services.prompts import Prompt
from services.protobuf.generation import check_counts
from services.security import caller_of
from smc.api.constraint import Constraint
from smc.api.limits import MAX_TOP_LOGPROBS
from smc.api.request import Alternatives, Answer, FinishReason, Output, Request
from smc.api.sampling_params import SETTINGS, Method, SamplingParams, with_defaults

UNSET = {
    pb.SamplingParams: ("truncate_prompt_tokens",),
    pb.GenerateRequest: ("kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "media_refs"),
}
"""Fields for features that this service does not have, by message."""
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
)
CHUNK = 64 << 10
"""Maximum size of the data in one message, in bytes."""
VLLM = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name


def check_request(message: pb.GenerateRequest) -> None:
    """Check that a request uses only features that this service has. Raises ValueError naming the field."""
    _check_unset(message)
    if message.extra_mm_inputs:
        raise ValueError("extra_mm_inputs is given; this service has text only: leave it out")
    if message.data_parallel_rank:
        raise ValueError(f"data_parallel_rank={message.data_parallel_rank}; allowed: 0, there is one")


def to_params(
    message: pb.SamplingParams, method: str, room: int, defaults: Mapping[str, Any] = MappingProxyType({})
) -> list[SamplingParams]:
    """Return the settings of each requested answer. `method`: the method to use, for which the protocol has no field;
    `smc` becomes `exact` at temperature 0. `room`: the default of `max_tokens`. `defaults`: values of settings that the
    message leaves out.

    Raises ValueError naming the field, the value and what is allowed.
    """
    _check_unset(message)
    # Before the items are converted: a message may hold millions.
    check_counts(message)
    count = message.n or 1
    if count > MAX_ANSWERS:
        raise ValueError(f"n={count}; allowed: 1..{MAX_ANSWERS}")
    settings = with_defaults({"max_tokens": room, **_settings(message)}, defaults, method)
    seeds = seeds_of(settings.pop("seed", None), count)
    return [SamplingParams(**settings, seed=seed) for seed in seeds]


def _settings(message: pb.SamplingParams) -> dict[str, Any]:
    """Return the constraint and those given settings that have the same name in the protocol and the library."""
    settings: dict[str, Any] = _constraint(message)
    for name in SETTINGS:
        known = message.DESCRIPTOR.fields_by_name.get(name)
        if name == "repetition_penalty" and not message.repetition_penalty:
            continue  # 0 is what a client that does not know the field sends
        if known is None or not (message.HasField(name) if known.has_presence else getattr(message, name)):
            continue
        value = getattr(message, name)
        if known.type == FieldDescriptor.TYPE_FLOAT:
            value = round(value, 7)  # 32 bits: 0.7 arrives as 0.699999988
        settings[name] = value if not known.is_repeated else dict(value) if known.message_type else tuple(value)
    if "logprobs" in settings:
        settings |= _logprobs(settings["logprobs"])
    return settings


def _logprobs(count: int) -> dict[str, Any]:
    """Return the settings for log-probabilities of the drawn token and of the `count` likeliest tokens."""
    if not 0 <= count <= MAX_TOP_LOGPROBS:
        raise ValueError(f"logprobs={count}; allowed: 0..{MAX_TOP_LOGPROBS}")
    return {"logprobs": True, "top_logprobs": count}


def _constraint(message: pb.SamplingParams) -> dict[str, Any]:
    kind = message.WhichOneof("constraint")
    if kind == "structural_tag":
        raise ValueError("structural_tag is given; allowed: json_schema, json_object, regex, grammar or choice")
    if kind is None or getattr(message, kind) is False:
        return {}
    value = list(message.choice.choices) if kind == "choice" else getattr(message, kind)
    return {"constraint": Constraint.of({kind: value}, kind)}


def _check_unset(message: pb.SamplingParams | pb.GenerateRequest) -> None:
    for name in UNSET[type(message)]:
        if message.HasField(name):
            raise ValueError(f"{name} is given; this service does not have it: leave it out")


def chunks(request: Request, index: int, output: Output) -> list[pb.GenerateResponse]:
    """Return the responses of a stream: new tokens, and after the last ones how the answer ended. The likeliest tokens
    and the log-probabilities of the prompt are known only at the end, so an answer with them comes in one piece."""
    params, answer = request.params, output.answer
    complete = None if answer is None else _complete(request, answer, index)
    if params.top_logprobs or params.prompt_logprobs is not None:
        tokens, scored = answer.tokens if answer else (), _given(complete, "output_logprobs")
    else:
        tokens, scored = output.tokens, _output_logprobs(output.tokens, output.logprobs)
    responses = []
    if tokens:
        chunk = pb.GenerateStreamChunk(
            token_ids=tokens,
            prompt_tokens=len(request.prompt),
            completion_tokens=len(tokens),
            cached_tokens=answer.cached_tokens if answer else 0,
            output_logprobs=scored,
            input_logprobs=_given(complete, "input_logprobs"),
            index=index,
        )
        responses.append(pb.GenerateResponse(chunk=chunk))
    return responses if complete is None else [*responses, pb.GenerateResponse(complete=complete)]


def _given(complete: pb.GenerateComplete | None, name: str) -> Any:
    """Return a message within the end of an answer; None if it has none."""
    return getattr(complete, name) if complete is not None and complete.HasField(name) else None


def whole(request: Request, index: int, output: Output) -> list[pb.GenerateResponse]:
    """Return the responses of a call without a stream: nothing before the answer, then the whole answer."""
    if output.answer is None:
        return []
    return [pb.GenerateResponse(complete=_complete(request, output.answer, index))]


def _complete(request: Request, answer: Answer, index: int) -> pb.GenerateComplete:
    complete = pb.GenerateComplete(
        output_ids=answer.tokens,
        finish_reason=OPENAI_FINISH[answer.finish_reason],
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=len(answer.tokens),
        cached_tokens=answer.cached_tokens,
        output_logprobs=_answer_logprobs(answer),
        input_logprobs=_input_logprobs(request, answer),
        index=index,
    )
    if isinstance(answer.matched, str):
        complete.matched_stop_str = answer.matched
    elif answer.finish_reason is FinishReason.STOP_TOKEN:
        complete.matched_token_id = answer.matched
    return complete


def _answer_logprobs(answer: Answer) -> pb.OutputLogProbs | None:
    return _output_logprobs(answer.tokens, answer.logprobs or (), answer.top_logprobs)


def _input_logprobs(request: Request, answer: Answer) -> pb.InputLogProbs | None:
    """Return the prompt's log-probabilities in the form of `_output_logprobs`; the first token has none."""
    if answer.prompt_logprobs is None:
        return None
    prompt, scores = request.prompt, answer.prompt_logprobs
    likeliest = [score.likeliest or ((token, score.logprob),) for token, score in zip(prompt[1:], scores)]
    return pb.InputLogProbs(
        token_ids=prompt,
        token_logprobs=[pb.InputTokenLogProb(), *(pb.InputTokenLogProb(value=score.logprob) for score in scores)],
        top_logprobs=[pb.TopLogProbs(), *map(_top, likeliest)],
    )


def _output_logprobs(
    tokens: Sequence[int], logprobs: Sequence[float], top_logprobs: Sequence[Alternatives] | None = None
) -> pb.OutputLogProbs | None:
    """Return the log-probabilities of the drawn and of the likeliest tokens. If the likeliest were not requested, each
    drawn token takes their place."""
    if not logprobs:
        return None
    top_logprobs = top_logprobs or [((token, logprob),) for token, logprob in zip(tokens, logprobs)]
    return pb.OutputLogProbs(token_ids=tokens, token_logprobs=logprobs, top_logprobs=map(_top, top_logprobs))


def _top(likeliest: Alternatives) -> pb.TopLogProbs:
    return pb.TopLogProbs(token_ids=[token for token, _ in likeliest], values=[logprob for _, logprob in likeliest])


def tokenizer_chunks(directory: Path) -> Iterator[common_pb2.GetTokenizerChunk]:
    """Yield the parts of a zip archive of those `FILES` that exist. The archive is the same at every call; its SHA-256
    comes with the last part. Raises OSError."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in FILES:
            if (path := directory / name).is_file():
                archive.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    data = buffer.getvalue()
    for begin in range(0, len(data), CHUNK):
        last = begin + CHUNK >= len(data)
        yield common_pb2.GetTokenizerChunk(
            data=data[begin : begin + CHUNK], sha256=hashlib.sha256(data).hexdigest() if last else ""
        )


def add_to(server: ApiServer) -> None:
    """Add this API to the gateway: see `services.gateway.request_handler.FrontEnd`."""
    service = VllmService(server.handler)
    server.add_grpc_service(VLLM, partial(pb_grpc.add_VllmEngineServicer_to_server, service))


class VllmService(pb_grpc.VllmEngineServicer):
    """Serves the protocol. Use it in one asyncio loop. The gateway turns exceptions of methods into statuses."""

    def __init__(self, handler: RequestHandler) -> None:
        self._handler, self._pair = handler, handler.pair
        self._method = Method(handler.config.default_method)
        self._started = time.monotonic()
        self._most_running = self._pair.engine.max_slots // SamplingParams(method=self._method).rows
        self._received = 0.0
        self._archive: list[common_pb2.GetTokenizerChunk] | None = None
        """Archive of the tokenizer, once it has been requested."""

    async def Generate(self, message: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        async def parse(request_id: str) -> list[Request]:
            return await self._requests(request_id, message)

        self._received = time.time()
        await self._handler.serve(
            f"{VLLM}/Generate", message.request_id, context, parse, chunks if message.stream else whole
        )

    async def Abort(self, message: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        """Abort requests that came with the caller's token. Ids without a running request are ignored."""
        caller = caller_of(context.invocation_metadata())
        for request_id in message.request_ids:
            self._handler.calls.abort((caller, request_id))
        return pb.AbortResponse()

    async def HealthCheck(
        self, message: pb.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> pb.HealthCheckResponse:
        closed = self._handler.calls.closed
        return pb.HealthCheckResponse(healthy=closed is None, message=closed or "serving")

    async def GetModelInfo(
        self, message: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        pair = self._pair
        target, files = pair.target, str(pair.files or "")
        return pb.GetModelInfoResponse(
            model_path=files or target.name,
            served_model_name=self._handler.config.name_of(target.name),
            tokenizer_path=files,
            is_generation=True,
            max_context_length=pair.context,
            max_req_input_len=pair.context - 1,
            vocab_size=pair.tokenizer.size,
            model_type=target.config.family,
            architectures=[target.config.traits.architecture],
            eos_token_ids=pair.tokenizer.eos_ids,
        )

    async def GetServerInfo(
        self, message: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        status = self._handler.status()
        return pb.GetServerInfoResponse(
            active_requests=status.running + status.queued,
            last_receive_timestamp=self._received,
            uptime_seconds=time.monotonic() - self._started,
            server_type="vllm-grpc",
            data_parallel_size=1,
            max_num_seqs=self._most_running * len(status.groups),
        )

    async def GetLoads(self, message: pb.GetLoadsRequest, context: grpc.aio.ServicerContext) -> pb.GetLoadsResponse:
        status = self._handler.status()
        held, room = status.tokens
        load = pb.SchedulerLoad(
            num_running_reqs=status.running,
            num_waiting_reqs=status.queued,
            num_total_reqs=status.running + status.queued,
            num_used_tokens=held,
            max_total_num_tokens=room,
            token_usage=held / max(room, 1),
            max_running_requests=self._most_running * status.num_serving,
        )
        version = importlib.metadata.version("smcserve")
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(), version=version, dp_rank_count=1, loads=[load]
        )

    async def GetTokenizer(self, message: common_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext) -> None:
        if (files := self._pair.files) is None:
            raise Unimplemented("GetTokenizer: the served model has random weights and no tokenizer")
        archive = self._archive
        if archive is None:
            archive = self._archive = await asyncio.to_thread(lambda: list(tokenizer_chunks(files)))
        for chunk in archive:
            await self._handler.write(context, chunk)

    async def SubscribeKvEvents(
        self, message: common_pb2.SubscribeKvEventsRequest, context: grpc.aio.ServicerContext
    ) -> None:
        raise Unimplemented(
            "SubscribeKvEvents: this service does not report what its prefix cache holds; route by prefixes instead"
        )

    async def Embed(self, message: pb.EmbedRequest, context: grpc.aio.ServicerContext) -> None:
        raise Unimplemented("Embed: this service has no embeddings; it answers Generate")

    async def FlushCache(self, message: common_pb2.FlushCacheRequest, context: grpc.aio.ServicerContext) -> None:
        raise Unimplemented(
            "FlushCache: the prefix cache is evicted as needed; start the service with --no-prefix-cache to disable it"
        )

    async def StartProfile(self, message: common_pb2.StartProfileRequest, context: grpc.aio.ServicerContext) -> None:
        raise Unimplemented("StartProfile: start the service with --trace FILE for a trace of all rounds")

    async def StopProfile(self, message: common_pb2.StopProfileRequest, context: grpc.aio.ServicerContext) -> None:
        raise Unimplemented("StopProfile: start the service with --trace FILE for a trace of all rounds")

    async def _requests(self, request_id: str, message: pb.GenerateRequest) -> list[Request]:
        """Return one request for each answer. Raises ValueError naming the field, the value and what is allowed."""
        check_request(message)
        # Settings before the prompt: checking them is fast, while encoding a long prompt takes time.
        parsed = to_params(message.sampling_params, self._method, LONGEST, self._pair.sampling)
        form = message.WhichOneof("input")
        if form is None:
            raise ValueError("input is missing; allowed: one of tokenized, text")
        source = Prompt(text=message.text) if form == "text" else Prompt(token_ids=tuple(message.tokenized.input_ids))
        prompt = await self._handler.prompts.tokens(source)
        if form == "tokenized" and (largest := max(prompt)) >= (size := self._pair.tokenizer.size):
            raise ValueError(f"tokenized.input_ids contains {largest}; allowed: 0..{size - 1}")
        room = self._handler.default_length(parsed[0], len(prompt))
        settings = to_params(message.sampling_params, self._method, room, self._pair.sampling)
        return [Request(request_id, prompt, params) for params in settings]
