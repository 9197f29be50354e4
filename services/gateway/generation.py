"""`smc.v1.GenerationService`: messages in, the backend's news out. Knows nothing about how answers are decoded."""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import grpc

from services.backend import Backend, Model, ServingPair, check_cache_salt
from services.errors import SlowReader, status_of
from services.gateway.calls import Calls, Tally
from services.gateway.config import GatewayConfig
from services.gateway.interceptors import caller_of
from services.gateway.prompts import Prompts
from services.metrics import Metrics
from services.pb import generation_pb2 as pb
from services.pb import generation_pb2_grpc as pb_grpc
from services.wire.generation import to_finish, to_sampling
from smc.engine.admission import check_waiting
from smc.engine.request import Output, Request

DEFAULT_MAX_TOKENS = 256
MAX_ID_SIZE = 256
CALL = "smc.v1.GenerationService/Generate"
DEADLINE_SLACK = 0.05
"""A caller cancels at its own deadline, which can reach us a moment before ours."""


@dataclass(frozen=True)
class ServiceStatus:
    """What only who runs the workers knows."""

    epoch: int
    """Grows by one with every restart of the workers."""
    running: int
    """Requests that hold slots."""
    queued: int
    pages: Mapping[str, int] = field(default_factory=dict)
    """KV pages of each model; empty until the workers have said."""


class GenerationService(pb_grpc.GenerationServiceServicer):
    """One asyncio loop, as many calls as come. Methods raise what is wrong; `services.gateway.intake.Intake` tells the caller."""

    def __init__(
        self,
        pair: ServingPair,
        backend: Backend,
        calls: Calls,
        metrics: Metrics,
        status: Callable[[], ServiceStatus],
        config: GatewayConfig,
    ) -> None:
        self._pair, self._backend, self._calls, self._metrics, self._status = pair, backend, calls, metrics, status
        self._config, self._write_timeout = config, config.write_timeout
        self.prompts = Prompts(pair.tokenizer, pair.context)
        self._started = time.monotonic()

    def close(self) -> None:
        self.prompts.close()

    async def Generate(self, message: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        tally = self._calls.arrives(CALL, context.invocation_metadata())
        try:
            if len(message.request_id) > MAX_ID_SIZE:
                raise ValueError(f"request_id has {len(message.request_id)} characters; allowed: at most {MAX_ID_SIZE}")
            request_id = message.request_id or uuid.uuid4().hex
            tally.is_of(request_id)
            async with self._calls.enter((caller_of(context.invocation_metadata()), request_id)):
                check_waiting(self._pair.engine, self._status().queued)
                request = await self._request(request_id, message)
                tally.asks(request)
                await self._answer(replace(request, waited=tally.seconds), context, tally)
        except asyncio.CancelledError:
            tally.left(_deadline_passed(context))
            raise
        except Exception as error:
            if context.done():  # the caller left, and the write that was under way says so in its own words
                tally.left(_deadline_passed(context))
                return
            tally.failed(status_of(error), error)
            raise

    async def Abort(self, message: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        if not message.request_id:
            raise ValueError("request_id=''; allowed: the id of a request, which every response of it carries")
        return pb.AbortResponse(aborted=self._calls.abort((caller_of(context.invocation_metadata()), message.request_id)))

    async def GetModelInfo(self, message: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext) -> pb.GetModelInfoResponse:
        pair = self._pair
        return pb.GetModelInfoResponse(
            target=_model(pair.target),
            draft=_model(pair.draft),
            vocab_size=pair.tokenizer.size,
            max_context=pair.context,
            eos_token_ids=pair.tokenizer.eos_ids,
            has_chat_template=pair.tokenizer.has_chat_template,
        )

    async def GetServerInfo(self, message: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext) -> pb.GetServerInfoResponse:
        engine, status = self._pair.engine, self._status()
        return pb.GetServerInfoResponse(
            version=importlib.metadata.version("smcserve"),
            form=engine.form,
            block=engine.block,
            branches=engine.branches,
            max_slots=engine.max_slots,
            link=self._pair.link,
            epoch=status.epoch,
            serving=self._calls.closed is None,
            running=status.running,
            queued=status.queued,
            uptime_seconds=time.monotonic() - self._started,
            max_queue=engine.max_queue or 0,
            max_calls=self._config.max_calls,
            max_message_bytes=self._config.message_bytes(self._pair.context),
        )

    async def _request(self, request_id: str, message: pb.GenerateRequest) -> Request:
        """Raises ValueError naming the field, the value and what is allowed."""
        check_cache_salt(message.cache_salt)
        # Settings before the prompt: they are checked in no time, while a long prompt takes some to encode.
        defaults = {"method": self._config.default_method}
        to_sampling(message.sampling, logprobs=message.logprobs, **defaults)
        prompt = await self.prompts.encode(message)
        room = max(1, self._pair.context - len(prompt))
        params = to_sampling(message.sampling, logprobs=message.logprobs, **defaults, max_tokens=min(DEFAULT_MAX_TOKENS, room))
        return Request(request_id, prompt, params, message.cache_salt)

    async def _answer(self, request: Request, context: grpc.aio.ServicerContext, tally: Tally) -> None:
        """Send news until the answer. However this ends, the backend's iterator is closed, which aborts what still runs."""
        plain = request.params.method.plain
        async with aclosing(self._backend.generate(request)) as news:
            async for output in news:
                tally.count(len(request.prompt), len(output.tokens))
                await self._write(context, _response(output, plain))
                if output.answer is not None:
                    tally.answered(output.answer)

    async def _write(self, context: grpc.aio.ServicerContext, response: pb.GenerateResponse) -> None:
        """Waits while the caller does not read: HTTP/2 lets us send no more than it has room for."""
        try:
            async with asyncio.timeout(self._write_timeout):
                await context.write(response)
        except TimeoutError as error:
            raise SlowReader(
                f"the caller did not read for {self._write_timeout:g} s while an answer was sent; the request was aborted"
            ) from error


def _response(output: Output, plain: bool) -> pb.GenerateResponse:
    response = pb.GenerateResponse(request_id=output.request_id, text=output.text, token_ids=output.tokens)
    if output.answer is not None:
        response.finish.CopyFrom(to_finish(output.answer, statistics=not plain))
    return response


def _deadline_passed(context: grpc.aio.ServicerContext) -> bool:
    left = context.time_remaining()
    return left is not None and left <= DEADLINE_SLACK


def _model(model: Model) -> pb.Model:
    return pb.Model(
        name=model.name,
        family=model.config.family,
        parameters=model.parameters,
        tensor_parallel=model.tensor_parallel,
        weights=model.weights,
    )
