"""Answers that are requested again when the worker group is lost: the stream has no token twice, misses none, and mixes
no two answers."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from services.backend import Unavailable
from services.launch.resume import MOST, resuming
from smc.api.request import Answer, FinishReason, Output, Request, Statistics
from smc.api.sampling_params import SamplingParams

TOKENS = tuple(range(20))


def text_of(tokens: tuple[int, ...]) -> str:
    return "".join(f"{token}," for token in tokens)


def logprobs_of(tokens: tuple[int, ...], life: int = 0) -> tuple[float, ...]:
    """Return log-probabilities of the tokens. Like real ones, whose last bits depend on the rest of the batch, they
    differ slightly between attempts (`life`)."""
    return tuple(-token - life * 2**-20 for token in tokens)


ANSWER = Answer("r", TOKENS, text_of(TOKENS), FinishReason.LENGTH, None, 1, 3, Statistics(1), 0.1, logprobs_of(TOKENS))


class Shaky:
    """Gives the same answer at each attempt, in pieces of another size, and is lost after as many tokens as `losses`
    says for that attempt."""

    def __init__(self, losses: list[int], tokens: tuple[int, ...] = TOKENS) -> None:
        self.losses, self.tokens, self.seeds, self.waits = losses, tokens, [], []
        self.confirmed = []

    async def ask(self, request: Request):
        life = len(self.seeds)
        self.seeds.append(request.params.seed)
        self.waits.append(request.waited)
        self.confirmed.append((request.confirmed, request.confirmed_logprobs))
        size = 1 + life
        for begin in range(0, len(self.tokens), size):
            piece = self.tokens[begin : begin + size] if life == 0 else TOKENS[begin : begin + size]
            if life < len(self.losses) and begin >= self.losses[life]:
                raise Unavailable("lost")
            yield Output("r", piece, text_of(piece), logprobs=logprobs_of(piece, life))
        yield Output("r", (), "", replace(ANSWER, logprobs=logprobs_of(TOKENS, life)))

    async def is_back(self) -> None:
        await asyncio.sleep(0.01)


def follow(shaky: Shaky, **params) -> list[Output]:
    async def work() -> list[Output]:
        request = Request("r", (1, 2, 3), SamplingParams(**params), waited=5.0)
        return [output async for output in resuming(request, shaky.ask, shaky.is_back)]

    return asyncio.run(work())


@pytest.mark.parametrize("method", ["exact", "target"])
@pytest.mark.parametrize("losses", [[], [0], [7], [7, 3], [5, 11, 11]])
def test_the_stream_goes_on_where_it_broke_off(method, losses):
    shaky = Shaky(losses)
    found = follow(shaky, method=method)
    assert sum((output.tokens for output in found), ()) == TOKENS and "".join(
        output.text for output in found
    ) == text_of(TOKENS)
    logprobs = sum((output.logprobs for output in found), ())
    assert logprobs == pytest.approx(ANSWER.logprobs, abs=1e-5)
    assert found[-1].answer == replace(ANSWER, logprobs=logprobs) and all(output.tokens for output in found[:-1])
    assert len(set(shaky.seeds)) == 1 and shaky.seeds[0] is not None
    assert shaky.confirmed[0] == ((), ()) and len(shaky.confirmed) == len(losses) + 1
    for tokens, logprobs in shaky.confirmed[1:]:
        assert tokens == TOKENS[: len(tokens)] and logprobs == pytest.approx(logprobs_of(tokens), abs=1e-5)
    assert [len(tokens) > 0 for tokens, _ in shaky.confirmed[1:]] == [
        max(losses[: i + 1]) > 0 for i in range(len(losses))
    ]
    assert shaky.waits == sorted(shaky.waits) and shaky.waits[0] >= 5.0, "time budgets run from arrival"


def test_resumed_answer_keeps_streamed_tokens_on_timeout():
    """If the time budget ends while an interrupted answer waits to be resumed, the answer holds the tokens that were
    already streamed and ends with TIME_BUDGET."""

    class OutOfTime(Shaky):
        async def ask(self, request: Request):
            async for output in super().ask(request):
                if len(self.seeds) > 1:
                    break
                yield output
            early = replace(
                ANSWER, tokens=(), text="", logprobs=(), top_logprobs=(), finish_reason=FinishReason.QUEUE_TIME
            )
            yield Output("r", (), "", early)

    found = follow(OutOfTime([7]), method="exact", time_budget=5.0)
    given = sum((output.tokens for output in found), ())
    answer = found[-1].answer
    assert given == TOKENS[:7] == answer.tokens and answer.text == text_of(given)
    assert answer.logprobs == logprobs_of(given)
    assert answer.finish_reason is FinishReason.TIME_BUDGET and answer.top_logprobs == ((),) * 7


def test_rejection_is_decoded_again_from_its_beginning():
    """Its tokens depend on more than the seed and the tokens before them."""
    shaky = Shaky([7])
    follow(shaky, method="exact", verification="rejection")
    assert shaky.confirmed == [((), ())] * 2


def test_populations_are_not_resumed():
    """An SMC answer fails when its worker group is lost; only `exact` and `target` are resumed."""
    with pytest.raises(Unavailable, match="lost"):
        follow(Shaky([7]), method="smc")


def test_resumes_are_limited():
    """A request is resumed at most `MOST` times."""
    shaky = Shaky([3] * 10)
    with pytest.raises(Unavailable, match="lost"):
        follow(shaky, method="exact")
    assert len(shaky.seeds) == MOST + 1


def test_different_repeat_fails():
    """If the repeated answer differs from what was already streamed, the call fails."""
    shaky = Shaky([7], tokens=(*TOKENS[:5], 99, *TOKENS[6:]))
    with pytest.raises(Unavailable, match="decoding again gave a different answer"):
        follow(shaky, method="target")
    assert len(shaky.seeds) == 2
