"""Requests are sent again after the service was lost and has come back, but only a limited number of times."""

from __future__ import annotations

import asyncio

import pytest

from services.backend import Unavailable
from services.batch.runner import ATTEMPTS, RetryingDecoder, ServiceLost, ServiceState
from smc.api.request import Output, Request
from tests.batch.asking import answer_of


class Shaky:
    """A backend that is lost each time it decodes a request of `deadly`, as often as its value says, and soon comes
    back."""

    def __init__(self, serving: ServiceState, deadly: dict[str, int]) -> None:
        self._serving, self._left, self.calls = serving, dict(deadly), []
        self._lost = asyncio.Event()

    async def generate(self, request: Request):
        assert self._serving._now.is_set(), "asked while it does not serve"
        self.calls.append(request.request_id)
        lost = self._lost
        if self._left.get(request.request_id, 0):
            self._left[request.request_id] -= 1
            self._lost = asyncio.Event()
            self._serving.set_health(False)
            lost.set()
            asyncio.get_running_loop().call_later(0.01, self._serving.set_health, True)
        try:
            async with asyncio.timeout(0.005):
                await lost.wait()
            raise Unavailable("lost")
        except TimeoutError:
            yield Output(request.request_id)
            yield Output(request.request_id, answer=answer_of(request))


def decode_all(deadly: dict[str, int], ids: str) -> tuple[dict, list[str]]:
    async def run():
        serving = ServiceState(patience=1)
        serving.set_health(True)
        backend = Shaky(serving, deadly)
        decoder = RetryingDecoder(backend, serving)
        requests = [Request(each, (1, 2)) for each in ids]
        found = await asyncio.gather(*(decoder.decode(request) for request in requests), return_exceptions=True)
        return dict(zip(ids, found)), backend.calls

    return asyncio.run(run())


def test_a_lost_request_is_sent_again():
    found, calls = decode_all({"b": ATTEMPTS - 1}, "abc")
    assert [found[each].request_id for each in "abc"] == list("abc")
    assert calls.count("b") == ATTEMPTS


def test_fatal_line_fails_alone():
    """A request that makes the service fail at every attempt fails after `ATTEMPTS`; all others are answered."""
    found, calls = decode_all({"b": 99}, "abcdef")
    assert isinstance(found.pop("b"), Unavailable)
    assert {each: answer.request_id for each, answer in found.items()} == {each: each for each in "acdef"}
    assert calls.count("b") == ATTEMPTS == max(map(calls.count, calls))


def test_a_service_that_does_not_come_back():
    async def run():
        serving = ServiceState(patience=0.05)
        await RetryingDecoder(Shaky(serving, {}), serving).decode(Request("a", (1,)))

    with pytest.raises(ServiceLost, match=r"did not come back within 0\.05 s"):
        asyncio.run(run())
