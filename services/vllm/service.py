"""`vllm.grpc.engine.VllmEngine`: vLLM's engine protocol over the same backend, with the same limits and checks as
`smc.v1`.

Knows nothing about who routes calls here.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
from datetime import UTC, datetime

import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc
from smg_grpc_proto.generated import common_pb2

from services.backend import Unimplemented
from services.gateway.answering import Answering
from services.gateway.interceptors import caller_of
from services.openai.requests import LONGEST
from services.prompt import Prompt
from services.vllm.responses import chunks, whole
from services.vllm.sampling import check_request, to_params
from services.vllm.tokenizer import tokenizer_chunks
from smc.api.request import Request
from smc.api.sampling_params import Method, SamplingParams

VLLM = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
DEFAULT_METHOD = Method.EXACT
"""The protocol does not know of methods, and its callers expect the target's own answers, unless the service is told
otherwise."""

add_to_server = pb_grpc.add_VllmEngineServicer_to_server


class VllmService(pb_grpc.VllmEngineServicer):
    """Use it in one asyncio loop. Methods raise what is wrong."""

    def __init__(self, answering: Answering) -> None:
        self._answering, self._pair = answering, answering.pair
        self._method = Method(answering.config.default_method or DEFAULT_METHOD)
        self._started = time.monotonic()
        self._most_running = self._pair.engine.max_slots // SamplingParams(method=self._method).rows
        self._received = 0.0
        self._archive: list[common_pb2.GetTokenizerChunk] | None = None
        """Of the tokenizer, once somebody has asked for it."""

    async def Generate(self, message: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        async def ask(request_id: str) -> list[Request]:
            return await self._requests(request_id, message)

        self._received = time.time()
        await self._answering.serve(
            f"{VLLM}/Generate", message.request_id, context, ask, chunks if message.stream else whole
        )

    async def Abort(self, message: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        """Ids belong to the token that they came with; those of no running request are passed over."""
        caller = caller_of(context.invocation_metadata())
        for request_id in message.request_ids:
            self._answering.calls.abort((caller, request_id))
        return pb.AbortResponse()

    async def HealthCheck(
        self, message: pb.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> pb.HealthCheckResponse:
        closed = self._answering.calls.closed
        return pb.HealthCheckResponse(healthy=closed is None, message=closed or "serving")

    async def GetModelInfo(
        self, message: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        pair = self._pair
        target, files = pair.target, str(pair.files or "")
        return pb.GetModelInfoResponse(
            model_path=files or target.name,
            served_model_name=self._answering.config.name_of(target.name),
            tokenizer_path=files,
            is_generation=True,
            max_context_length=pair.context,
            max_req_input_len=pair.context - 1,
            vocab_size=pair.tokenizer.size,
            model_type=target.config.family,
            architectures=[ARCHITECTURES[target.config.family]],
            eos_token_ids=pair.tokenizer.eos_ids,
        )

    async def GetServerInfo(
        self, message: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        status = self._answering.status()
        return pb.GetServerInfoResponse(
            active_requests=status.running + status.queued,
            last_receive_timestamp=self._received,
            uptime_seconds=time.monotonic() - self._started,
            server_type="vllm-grpc",
            data_parallel_size=1,
            max_num_seqs=self._most_running,
        )

    async def GetLoads(self, message: pb.GetLoadsRequest, context: grpc.aio.ServicerContext) -> pb.GetLoadsResponse:
        status = self._answering.status()
        load = pb.SchedulerLoad(
            num_running_reqs=status.running,
            num_waiting_reqs=status.queued,
            num_total_reqs=status.running + status.queued,
            num_used_tokens=status.tokens_held,
            max_total_num_tokens=status.tokens_room,
            token_usage=status.tokens_held / max(status.tokens_room, 1),
            max_running_requests=self._most_running,
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
            await self._answering.write(context, chunk)

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
            "FlushCache: the prefix cache gives way by itself; start the service with --no-prefix-cache to have none"
        )

    async def StartProfile(self, message: common_pb2.StartProfileRequest, context: grpc.aio.ServicerContext) -> None:
        raise Unimplemented("StartProfile: start the service with --trace FILE for a trace of all rounds")

    async def StopProfile(self, message: common_pb2.StopProfileRequest, context: grpc.aio.ServicerContext) -> None:
        raise Unimplemented("StopProfile: start the service with --trace FILE for a trace of all rounds")

    async def _requests(self, request_id: str, message: pb.GenerateRequest) -> list[Request]:
        """Raises ValueError naming the field, the value and what is allowed."""
        check_request(message)
        # Settings before the prompt: they are checked in no time, while a long prompt takes some to encode.
        asked_for = to_params(message.sampling_params, self._method, room=LONGEST)
        form = message.WhichOneof("input")
        if form is None:
            raise ValueError("input is missing; allowed: one of tokenized, text")
        asked = Prompt(text=message.text) if form == "text" else Prompt(token_ids=tuple(message.tokenized.input_ids))
        prompt = await self._answering.prompts.tokens(asked)
        if form == "tokenized" and (largest := max(prompt)) >= (size := self._pair.tokenizer.size):
            raise ValueError(f"tokenized.input_ids contains {largest}; allowed: 0..{size - 1}")
        room = self._answering.longest(asked_for[0], len(prompt))
        settings = to_params(message.sampling_params, self._method, room)
        return [Request(request_id, prompt, params) for params in settings]
