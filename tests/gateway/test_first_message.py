"""A call that is aborted while its first message is being sent ends with a proper status."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from services.client import ServiceError
from services.gateway.request_handler import RequestHandler
from tests.gateway.harness import LONG, serving


@pytest.mark.parametrize("during", ["begin", "write"])
def test_a_call_that_is_aborted_while_its_first_message_is_on_its_way(pair, monkeypatch, during):
    """Before this was handled, gRPC refused a status whose headers were already being sent, and the client waited for
    ever."""
    send = getattr(RequestHandler, during)

    async def aborted_meanwhile(handler: RequestHandler, *what: object) -> None:
        for key in list(handler.calls._calls):
            asyncio.get_running_loop().call_soon(handler.calls.abort, key)
        await send(handler, *what)

    monkeypatch.setattr(RequestHandler, during, aborted_meanwhile)
    with serving(pair) as service, service.client() as client:
        for _ in range(3):
            with pytest.raises(ServiceError) as caught:
                client.generate("x", timeout=20, **LONG | {"particles": 2})
            assert caught.value.code is grpc.StatusCode.CANCELLED, caught.value
        service.wait_until_free()
