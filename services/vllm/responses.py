"""Answers as messages of vLLM's engine protocol, which carries tokens: whoever calls makes text of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from smg_grpc_proto import vllm_engine_pb2 as pb

from smc.api.outputs import Answer, FinishReason, Output
from smc.api.request import Request

FINISHES = {
    FinishReason.EOS: "stop",
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
}
"""All that an answer without a time budget may end with."""


def chunks(request: Request, index: int, output: Output) -> Iterator[pb.GenerateResponse]:
    """Of a stream: new tokens, and after the last ones how the answer ended. Log-probabilities are known with the
    answer, so an answer with them comes in one piece."""
    answer = output.answer
    tokens = output.tokens
    if request.params.logprobs:
        tokens = answer.tokens if answer else ()
    if tokens:
        chunk = pb.GenerateStreamChunk(
            token_ids=tokens,
            prompt_tokens=len(request.prompt),
            completion_tokens=len(tokens),
            cached_tokens=answer.cached_tokens if answer else 0,
            output_logprobs=_logprobs(tokens, answer),
            index=index,
        )
        yield pb.GenerateResponse(chunk=chunk)
    if answer is not None:
        yield _complete(answer, index)


def whole(request: Request, index: int, output: Output) -> Iterator[pb.GenerateResponse]:
    """Of a call that wants answers only."""
    if output.answer is not None:
        yield _complete(output.answer, index)


def _complete(answer: Answer, index: int) -> pb.GenerateResponse:
    complete = pb.GenerateComplete(
        output_ids=answer.tokens,
        finish_reason=FINISHES[answer.finish_reason],
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=len(answer.tokens),
        cached_tokens=answer.cached_tokens,
        output_logprobs=_logprobs(answer.tokens, answer),
        index=index,
    )
    if isinstance(answer.matched, str):
        complete.matched_stop_str = answer.matched
    elif answer.finish_reason is FinishReason.STOP_TOKEN:
        complete.matched_token_id = answer.matched
    return pb.GenerateResponse(complete=complete)


def _logprobs(tokens: Sequence[int], answer: Answer | None) -> pb.OutputLogProbs | None:
    """Of the drawn tokens, and the likeliest; where none of these are asked for, each drawn one stands there as the one
    that is known."""
    if answer is None or not answer.logprobs:
        return None
    tops = answer.top_logprobs or [((token, logprob),) for token, logprob in zip(tokens, answer.logprobs)]
    known = [
        pb.TopLogProbs(token_ids=[token for token, _ in top], values=[logprob for _, logprob in top]) for top in tops
    ]
    return pb.OutputLogProbs(token_ids=tokens, token_logprobs=answer.logprobs, top_logprobs=known)
