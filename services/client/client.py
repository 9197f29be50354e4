"""The client: calls over one connection to the service, and the types of its arguments, answers and errors. An answer's
statistics, times and particles are types of the library. Needs grpc and protobuf only: no model code is
imported."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.pb import generation_pb2 as pb
from services.pb import generation_pb2_grpc as pb_grpc
from services.protobuf import RETRY_TRAILER
from services.protobuf.generation import (
    FINISH_REASONS,
    REPORTS,
    data_of,
    name_of,
    sampling_message,
    to_alternatives,
    to_particle,
    to_prompt_tokens,
)
from services.security import is_loopback
from smc.api.request import Particle, PromptToken, Statistics, Times

ASK_TIMEOUT = 30.0
"""Time limit in seconds of every call but Generate: a service that needs longer is taken to be down."""


class ServiceError(RuntimeError):
    """A call failed. docs/errors.md says when each code is sent, and what to do."""

    def __init__(self, code: grpc.StatusCode, message: str, retry_after: float | None = None) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.retry_after = retry_after
        """Seconds after which the service suggests a retry; None: it suggests none."""


@dataclass(frozen=True)
class Message:
    """One message of a conversation."""

    role: str
    """`system`, `user` or `assistant`."""
    content: str


@dataclass(frozen=True)
class Chunk:
    """New text and tokens of an answer; they can no longer change. A chunk's text may be empty while a character is
    incomplete."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    """Log-probability of each token under the target's distribution, if requested."""


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens that had been computed for an earlier request; if both models run, the smaller of their two
    numbers."""


@dataclass(frozen=True)
class Completion:
    """A whole answer."""

    request_id: str
    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    """`eos`, `stop_token`, `stop_string`, `length`, `time_budget` or `queue_time`."""
    matched: int | str | None
    """The token id or string that ended the answer, if one did."""
    seed: int
    """Seed of the answer; the service draws one if none is given."""
    usage: Usage
    statistics: Statistics | None
    """None for plain decoding."""
    logprobs: tuple[float, ...] | None
    """Log-probability of each token under the target's distribution, if requested; the values of all chunks."""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None
    """For every token, if requested: the likeliest tokens at its position and their log-probabilities, likeliest
    first."""
    prompt_logprobs: tuple[PromptToken, ...] | None
    """For every token of the prompt but the first, if requested: log-probability, rank and likeliest tokens. None if
    there was no time to compute them."""
    particles: tuple[Particle, ...] | None
    """The particles that the answer was drawn from, if requested; for a method without particles, the answer itself."""
    seconds: float
    """Seconds from the call to the end of the answer, measured by the client."""
    times: Times


@dataclass(frozen=True)
class ModelDescription:
    name: str
    family: str
    """Key of the model's family in smc/model/families.py, such as `llama` or `qwen3`."""
    parameters: int
    tensor_parallel: int
    """Number of processes that share it; 0 for a draft whose processes choose it, before the first start."""
    weights: str = ""
    """Fingerprint of the weights: a hash of the files' names, sizes and headers, and of samples of their contents."""


@dataclass(frozen=True)
class ModelInfo:
    target: ModelDescription
    draft: ModelDescription
    vocab_size: int
    max_context: int
    """Longest prompt plus answer, in tokens."""
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool


@dataclass(frozen=True)
class WorkerGroupInfo:
    """State of one worker group."""

    serving: bool
    """Whether it decodes requests."""
    has_draft: bool
    incarnation: int
    """Grows by one with every start of all its processes, or of its draft alone."""
    running: int
    queued: int
    draft_tensor_parallel: int = 0
    """Number of processes that share the draft; 1 if each has the whole draft, 0 before the first start."""


@dataclass(frozen=True)
class ServerInfo:
    version: str
    form: str
    """`lockstep` or `lookahead`."""
    block: int
    """K, the maximum number of tokens drafted per round. Requests of SMC and of verification rejection may have another
    K (`--smc-block`, by default at most 5); trees of exact decoding may be smaller."""
    branches: int
    """F, branches drafted per particle."""
    max_slots: int
    """Maximum number of particles of all running requests of a worker group together."""
    link: str
    incarnation: int
    """Grows by one with every start of a worker group, or of a draft alone."""
    serving: bool
    running: int
    queued: int
    uptime_seconds: float
    max_queue: int
    """Maximum number of waiting requests; 0: any number."""
    max_calls: int
    """Maximum number of calls in flight."""
    max_message_bytes: int
    """Maximum size of a request in bytes."""
    default_max_tokens: int
    """Maximum tokens of a chat's answer over HTTP if its request gives no `max_tokens`."""
    placement: str
    """`apart`: each model has processes of its own; `shared`: every process has its share of both models."""
    draft_pages: int
    """Token positions in the KV pool of the draft, of the worker group with fewest; 0 until the workers have reported
    them."""
    target_pages: int
    worker_groups: tuple[WorkerGroupInfo, ...] = ()
    """In the order of their numbers."""
    numerics: str = ""
    """Order of sums of both models as they run, `invariant` or `fastest`; empty until the workers have reported it."""


Prompt = str | Sequence[int] | Sequence[Message]
"""Text (encoded as it is), token ids, or a conversation (put through the target's chat template)."""


class CompletionStream:
    """An answer that is being streamed. Iterate over its chunks; afterwards `completion` is set. Leaving the `with`
    block early cancels the request."""

    def __init__(self, call: Any, request: pb.GenerateRequest) -> None:
        self._call, self._request = call, request
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._started = time.monotonic()
        self.request_id = request.request_id
        """Id of the request, for `Client.abort`."""
        self.completion: Completion | None = None
        """The whole answer, once every chunk has been read."""

    def __enter__(self) -> CompletionStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __iter__(self) -> CompletionStream:
        return self

    def __next__(self) -> Chunk:
        """Return the next chunk. Raises ServiceError."""
        try:
            response = next(self._call)
        except grpc.RpcError as error:
            raise _service_error(error) from error
        except StopIteration:
            if self.completion is None:
                raise ServiceError(grpc.StatusCode.INTERNAL, "the stream ended before the answer did") from None
            raise
        logprobs = tuple(response.logprobs) if self._request.logprobs else None
        chunk = Chunk(response.text, tuple(response.token_ids), logprobs)
        self._texts.append(chunk.text)
        self._tokens += chunk.tokens
        if response.HasField("finish"):
            self.completion = self._complete(response.finish)
        return chunk

    def cancel(self) -> None:
        """End the request, if it is still running."""
        self._call.cancel()

    def _complete(self, finish: pb.Finish) -> Completion:
        matched, request = finish.WhichOneof("matched"), self._request
        return Completion(
            request_id=self.request_id,
            text="".join(self._texts),
            tokens=tuple(self._tokens),
            finish_reason=name_of(FINISH_REASONS, finish.reason, "finish.reason"),
            matched=getattr(finish, matched) if matched else None,
            seed=finish.seed,
            usage=data_of(Usage, finish.usage),
            statistics=data_of(Statistics, finish.statistics) if finish.HasField("statistics") else None,
            logprobs=tuple(finish.logprobs) if request.logprobs else None,
            top_logprobs=tuple(map(to_alternatives, finish.top_logprobs)) if request.top_logprobs else None,
            prompt_logprobs=to_prompt_tokens(finish.prompt_logprobs) if finish.HasField("prompt_logprobs") else None,
            particles=tuple(map(to_particle, finish.particles)) if request.return_particles else None,
            seconds=time.monotonic() - self._started,
            times=data_of(Times, finish.times),
        )


class Client:
    """One connection to the service, opened when it is first needed and again when it breaks; threads may share it.
    Close it, or use `with`.

    Every call raises ServiceError if the service refuses it or fails, and ValueError or TypeError for arguments that
    cannot be sent."""

    def __init__(
        self,
        target: str,
        *,
        token: str | None = None,
        tls: bool = False,
        tls_ca: str | Path | None = None,
        tls_cert: str | Path | None = None,
        tls_key: str | Path | None = None,
    ) -> None:
        """`target`: `host:port`. `tls`: encrypt, and trust the authorities of this machine; `tls_ca`: trust those in
        this PEM file instead. `tls_cert` and `tls_key`: PEM files of this client's certificate and key (mutual TLS).
        `token`: bearer token; never sent in plain text to another machine."""
        if (tls_cert is None) != (tls_key is None):
            given, missing = ("tls_cert", "tls_key") if tls_key is None else ("tls_key", "tls_cert")
            raise ValueError(f"{given} is given without {missing}; give both, or neither")
        credentials = channel_credentials(tls, tls_ca, tls_cert, tls_key)
        if token is not None and credentials is None and not _stays_here(target):
            raise ValueError(f"the token would go to {target} in plain text; give tls=True or tls_ca")
        options = [
            ("grpc.max_receive_message_length", -1),
            # Pings detect a connection that broke silently while an answer is awaited.
            ("grpc.keepalive_time_ms", 60_000),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.http2.ping_timeout_ms", 20_000),
            # Calls to this machine, and the token in them, do not go through a proxy.
            ("grpc.enable_http_proxy", int(not _stays_here(target))),
        ]
        if credentials is None:
            self._channel = grpc.insecure_channel(target, options)
        else:
            self._channel = grpc.secure_channel(target, credentials, options)
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        self._stub = pb_grpc.GenerationServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Calls in flight are cancelled."""
        self._channel.close()

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        request_id: str | None = None,
        cache_salt: str = "",
        negative_prompt: Prompt | None = None,
        priority: int = 0,
        **settings: Any,
    ) -> Completion:
        """Return the whole answer at once. Arguments: see `stream`."""
        with self.stream(
            prompt,
            timeout=timeout,
            request_id=request_id,
            cache_salt=cache_salt,
            negative_prompt=negative_prompt,
            priority=priority,
            **settings,
        ) as stream:
            for _ in stream:
                pass
        assert stream.completion is not None, "a stream that ends well has ended with an answer"
        return stream.completion

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        request_id: str | None = None,
        cache_salt: str = "",
        negative_prompt: Prompt | None = None,
        priority: int = 0,
        **settings: Any,
    ) -> CompletionStream:
        """Return the stream of an answer, which is sent as it becomes final.

        `timeout`: hard limit in seconds, after which the call fails with DEADLINE_EXCEEDED (`time_budget` is the soft
        one). `request_id`: unique among running requests; default: a random one. `cache_salt`: prompts share computed
        keys and values only with prompts of the same salt. `negative_prompt`: prompt that a guided answer is steered
        away from, with `guidance_scale`. `priority`: a lower number is admitted first. `settings`: fields of
        `smc.api.sampling_params.SamplingParams`, which describes them, such as `temperature=0.7`. A setting that is
        left out or None has the server's default; a setting that the method would ignore is refused."""
        reports = {name: settings.pop(name) for name in REPORTS if name in settings}
        request = pb.GenerateRequest(
            request_id=request_id or uuid.uuid4().hex,
            cache_salt=cache_salt,
            priority=priority,
            sampling=sampling_message(settings),
            **reports,
        )
        set_prompt(request, prompt)
        if negative_prompt is not None:
            set_prompt(request.negative_prompt, negative_prompt)
        call = self._stub.Generate(request, timeout=timeout, metadata=self._metadata)
        return CompletionStream(call, request)

    def abort(self, request_id: str) -> bool:
        """End a request of this client's token; its call fails with CANCELLED. Returns False if no such request is
        running."""
        return self._ask(self._stub.Abort, pb.AbortRequest(request_id=request_id)).aborted

    def model_info(self) -> ModelInfo:
        info = self._ask(self._stub.GetModelInfo, pb.GetModelInfoRequest())
        models = {role: data_of(ModelDescription, getattr(info, role)) for role in ("target", "draft")}
        return data_of(ModelInfo, info, **models, eos_token_ids=tuple(info.eos_token_ids))

    def server_info(self) -> ServerInfo:
        answer = self._ask(self._stub.GetServerInfo, pb.GetServerInfoRequest())
        groups = tuple(data_of(WorkerGroupInfo, group) for group in answer.worker_groups)
        return data_of(ServerInfo, answer, worker_groups=groups)

    def health(self, service: str = "") -> str:
        """Return `SERVING` or `NOT_SERVING`. `service`: empty for the whole service, or one of `smc.draft`,
        `smc.target`, `smc.gateway` and, if there are several worker groups, `smc.worker_group.0`, .."""
        answer = self._ask(self._health.Check, health_pb2.HealthCheckRequest(service=service))
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

    def states(self) -> dict[str, str]:
        """Return the `health` of every name that the service reports."""
        answer = self._ask(self._health.List, health_pb2.HealthListRequest())
        name_of = health_pb2.HealthCheckResponse.ServingStatus.Name
        return {service: name_of(one.status) for service, one in answer.statuses.items()}

    def _ask(self, method: Any, request: Any) -> Any:
        try:
            return method(request, timeout=ASK_TIMEOUT, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _service_error(error) from error


def channel_credentials(
    tls: bool, tls_ca: str | Path | None, tls_cert: str | Path | None, tls_key: str | Path | None
) -> grpc.ChannelCredentials | None:
    """Return the credentials of a connection with these options of `Client`; None: without TLS."""
    if not tls and tls_ca is None and tls_cert is None:
        return None
    files = (None if path is None else Path(path).read_bytes() for path in (tls_ca, tls_key, tls_cert))
    return grpc.ssl_channel_credentials(*files)


def set_prompt(request: pb.GenerateRequest | pb.NegativePrompt, prompt: Prompt) -> None:
    """Write a prompt into a message. Raises ValueError for what is no prompt."""
    items: Any = prompt
    if isinstance(prompt, str):
        request.text = prompt
        return
    kind = Message if len(prompt) and isinstance(prompt[0], Message) else int
    for item in items:
        if not isinstance(item, kind) or (isinstance(item, int) and not 0 <= item < 2**31):
            raise ValueError(f"prompt contains {item!r}; allowed: a string, a list of token ids, or a list of Message")
    if kind is Message:
        request.chat.messages.extend(pb.ChatMessage(role=each.role, content=each.content) for each in items)
    else:
        request.token_ids.SetInParent()  # an empty list is sent as well; the service refuses it
        request.token_ids.ids.extend(items)


def _stays_here(target: str) -> bool:
    """Return whether data sent to `target` never leaves this machine."""
    return target.startswith("unix:") or is_loopback(target.rsplit("/", 1)[-1].rpartition(":")[0])


def _service_error(error: grpc.RpcError) -> ServiceError:
    retry = dict(error.trailing_metadata() or ()).get(RETRY_TRAILER)
    return ServiceError(error.code(), error.details() or "", int(retry) / 1e3 if retry is not None else None)
