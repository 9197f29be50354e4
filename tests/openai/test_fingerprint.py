"""`system_fingerprint`: it is in every answer and every event of a stream, is the same for batch answers, and depends
on the weights."""

from __future__ import annotations

import json
from dataclasses import replace

from services.launch.config import WorkerGroupConfig
from services.openai.bodies import COMPLETIONS
from smc.api.engine_config import EngineConfig
from tests.openai.asking import chat, events, post


def test_answers_and_streams_name_what_they_depend_on(service):
    """Chats, completions and every event of a stream have the fingerprint of the served pair."""
    named = [
        post(service, chat(max_tokens=2)).json,
        post(service, json.dumps({"prompt": "x", "max_tokens": 2}).encode(), COMPLETIONS).json,
        *events(post(service, chat(max_tokens=2, stream=True)).data)[:-1],
    ]
    found = {one.get("system_fingerprint") for one in named}
    assert found == {service.gateway.handler.pair.fingerprint()} and len(named) > 3


def pair():
    """The demo pair with the settings of an earlier version, which had one K."""
    return WorkerGroupConfig(engine=EngineConfig(block=8, smc_block=8)).serving_pair()


def test_what_batch_files_name_has_not_changed():
    """The fingerprint of the demo pair is fixed: output files of earlier batch runs are resumed only if it is the
    same."""
    assert pair().fingerprint() == "smc_3a49f66e5c0c4d52c3f0c48d"


def test_settings_that_answers_depend_on_change_it():
    changed = [{"smc_block": None}, {"smc_block": 4}, {"block": 9}, {"branches": 3}, {"numerics": "invariant"}]
    plain = pair()
    found = {replace(plain, engine=replace(plain.engine, **one)).fingerprint() for one in [{}, *changed]}
    assert len(found) == len(changed) + 1
    other = replace(plain, engine=replace(plain.engine, drafting="always", max_slots=3))
    assert other.fingerprint() == plain.fingerprint()


def test_other_weights_of_the_same_name_and_size_are_other_models():
    served = pair()
    assert served.draft.weights
    trained_on = replace(served, draft=replace(served.draft, weights="0" * 16))
    assert trained_on.fingerprint() != served.fingerprint()
