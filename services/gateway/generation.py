"""The front end of `smc.v1.GenerationService`: converts between its messages and requests and answers of the library.
Knows nothing about decoding."""

from __future__ import annotations

import importlib.metadata
import time
from functools import partial

import grpc

from services.backend import Model, check_cache_salt
from services.gateway.request_handler import ApiServer, RequestHandler
from services.pb import generation_pb2 as pb
from services.pb import generation_pb2_grpc as pb_grpc
from services.protobuf.generation import to_finish, to_sampling
from services.security import caller_of
from smc.api.limits import DEFAULT_MAX_TOKENS
from smc.api.request import Output, Request, check_guidance, check_priority
from smc.types import ModelRole

API = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name
METHOD = f"{API}/Generate"


def add_to(server: ApiServer) -> None:
    """Add this API to the gateway: see `services.gateway.request_handler.FrontEnd`."""
    service = GenerationService(server.handler)
    server.add_grpc_service(API, partial(pb_grpc.add_GenerationServiceServicer_to_server, service))


class GenerationService(pb_grpc.GenerationServiceServicer):
    """Serves the API. Use it in one asyncio loop. The gateway turns exceptions of methods into statuses."""

    def __init__(self, handler: RequestHandler) -> None:
        self._handler, self._pair = handler, handler.pair
        self._started = time.monotonic()

    async def Generate(self, message: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        async def parse(request_id: str) -> list[Request]:
            return [await self._request(request_id, message)]

        await self._handler.serve(METHOD, message.request_id, context, parse, _responses)

    async def Abort(self, message: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        if not message.request_id:
            raise ValueError(
                "request_id=''; allowed: the id of a running request, which each of its responses contains"
            )
        key = (caller_of(context.invocation_metadata()), message.request_id)
        return pb.AbortResponse(aborted=self._handler.calls.abort(key))

    async def GetModelInfo(
        self, message: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        pair = self._pair
        return pb.GetModelInfoResponse(
            target=_model(pair.target, pair.target.tensor_parallel),
            draft=_model(pair.draft, self._handler.status().draft_degree or pair.draft.tensor_parallel),
            vocab_size=pair.tokenizer.size,
            max_context=pair.context,
            eos_token_ids=pair.tokenizer.eos_ids,
            has_chat_template=pair.tokenizer.has_chat_template,
        )

    async def GetServerInfo(
        self, message: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        engine, status, config = self._pair.engine, self._handler.status(), self._handler.config
        return pb.GetServerInfoResponse(
            version=importlib.metadata.version("smcserve"),
            form=engine.form,
            block=engine.block,
            branches=engine.branches,
            max_slots=engine.max_slots,
            link=self._pair.link,
            incarnation=status.incarnation,
            serving=self._handler.calls.closed is None,
            running=status.running,
            queued=status.queued,
            uptime_seconds=time.monotonic() - self._started,
            max_queue=engine.max_queue or 0,
            max_calls=config.max_calls,
            max_message_bytes=config.message_bytes(self._pair.context),
            default_max_tokens=config.default_max_tokens,
            placement=self._pair.placement,
            numerics=status.numerics or "",
            draft_pages=status.pages.get(ModelRole.DRAFT, 0),
            target_pages=status.pages.get(ModelRole.TARGET, 0),
            worker_groups=[
                pb.WorkerGroup(
                    serving=group.has_target,
                    has_draft=group.has_draft,
                    incarnation=group.incarnation,
                    running=group.stats.running,
                    queued=group.stats.queued,
                    draft_tensor_parallel=group.draft_degree,
                )
                for group in status.groups
            ],
        )

    async def _request(self, request_id: str, message: pb.GenerateRequest) -> Request:
        """Return the request of a message. Raises ValueError naming the field, the value and what is allowed."""
        check_cache_salt(message.cache_salt)
        check_priority(message.priority, *self._handler.config.priorities)
        # Settings before the prompt: checking them is fast, while encoding a long prompt takes time.
        method, defaults = self._handler.config.default_method, self._pair.sampling
        has_negative = message.HasField("negative_prompt")
        check_guidance(to_sampling(message, defaults, method), has_negative)
        prompt = await self._handler.prompts.encode(message)
        negative = await self._handler.prompts.negative(message.negative_prompt if has_negative else None)
        room = max(1, self._pair.context - max(len(prompt), len(negative or ())))
        params = to_sampling(message, defaults, method, max_tokens=min(DEFAULT_MAX_TOKENS, room))
        salt, priority = message.cache_salt, message.priority
        return Request(request_id, prompt, params, salt, negative_prompt=negative, priority=priority)


def _responses(request: Request, index: int, output: Output) -> list[pb.GenerateResponse]:
    response = pb.GenerateResponse(
        request_id=output.request_id, text=output.text, token_ids=output.tokens, logprobs=output.logprobs
    )
    if output.answer is not None:
        response.finish.CopyFrom(to_finish(output.answer, statistics=not request.params.method.plain))
    return [response]


def _model(model: Model, tensor_parallel: int) -> pb.Model:
    return pb.Model(
        name=model.name,
        family=model.config.family,
        parameters=model.parameters,
        tensor_parallel=tensor_parallel,
        weights=model.weights,
    )
