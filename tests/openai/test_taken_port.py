"""A port that another program takes after the check of all ports: the gateway's start fails, and stopping it raises no
further error."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.gateway.server import Gateway
from services.metrics import Metrics
from services.openai.server import add_to
from tests.gateway.harness import serving_pair


def test_a_stop_after_a_port_that_could_not_be_had(pair, service):
    """`start` raises OSError naming the port, and `stop` then succeeds."""

    async def start_and_stop() -> None:
        config = replace(service.config, port=0, http_port=service.gateway.http_port)
        models = serving_pair(pair, service.engine_config)
        gateway = Gateway(config, models, service.backend, Metrics(), service.backend.status, [add_to])
        with pytest.raises(OSError, match="give another http_port"):
            await gateway.start()
        await gateway.stop()

    service.do(start_and_stop())
