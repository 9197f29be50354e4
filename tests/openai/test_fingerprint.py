"""`system_fingerprint`: in every answer and every event of a stream, the same as in answers of a batch."""

from __future__ import annotations

import json

from services.launch.config import WorkerGroupConfig
from services.openai.bodies import COMPLETIONS
from smc.api.engine_config import EngineConfig
from tests.openai.asking import chat, events, post


def test_answers_and_streams_name_what_they_depend_on(service):
    named = [
        post(service, chat(max_tokens=2)).json,
        post(service, json.dumps({"prompt": "x", "max_tokens": 2}).encode(), COMPLETIONS).json,
        *events(post(service, chat(max_tokens=2, stream=True)).data)[:-1],
    ]
    found = {one.get("system_fingerprint") for one in named}
    assert found == {service.gateway.handler.pair.fingerprint()} and len(named) > 3


def test_what_batch_files_name_has_not_changed():
    """Files of earlier runs are resumed only by it."""
    pair = WorkerGroupConfig(engine=EngineConfig(block=8)).serving_pair()
    assert pair.fingerprint() == "smc_b78c86deebba6e6ce31f28c7"
