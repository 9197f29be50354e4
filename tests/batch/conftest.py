from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.backend import ServingPair
from services.batch.lines import RequestReader
from services.launch.config import WorkerGroupConfig
from smc import demo
from smc.api.engine_config import EngineConfig
from smc.demo.problems import generate
from smc.local_engine import ModelPair, local_engine
from tests.batch.asking import KINDS, LOCKSTEP, LOOKAHEAD, chat, line
from tests.batch.running import Cluster
from tests.batch.s3 import s3_server


@pytest.fixture(scope="session")
def pair() -> ServingPair:
    """The demo pair, as a run sees it before it loads a model."""
    return WorkerGroupConfig().serving_pair()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    """One cluster with a dashboard for the tests of a file, started as a user starts one, and a stand-in for S3. Both
    end with the file, before other tests start their own."""
    with s3_server() as settings, pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        cluster = Cluster(tmp_path_factory.mktemp("cluster"), **settings)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


@pytest.fixture(scope="session")
def asked() -> list[dict]:
    """16 request lines, two of which are invalid."""
    lines = [
        chat(f"q{i}", problem.question, **KINDS[i % len(KINDS)]) for i, problem in enumerate(generate(5, 16, "test"))
    ]
    lines[5] = chat("wrong", n=0)
    lines[9] = chat("too long", max_tokens=100_000)
    return lines


@pytest.fixture(scope="session")
def expected(pair, asked) -> dict[str, list[tuple]]:
    """What `essence` returns for the records of all lines, from engines of both forms in this process."""
    return {form: _expected(pair, asked, engine) for form, engine in (("ahead", LOOKAHEAD), ("lockstep", LOCKSTEP))}


def _expected(pair: ServingPair, asked: list[dict], settings: dict) -> list[tuple]:
    requests, wanted = RequestReader(pair, 3), {}
    for number, document in enumerate(asked, 1):
        if document["custom_id"].startswith("q"):
            wanted[document["custom_id"]] = requests.build(line(document, number))[0]
    engine = local_engine(ModelPair.load(demo.TARGET, demo.DRAFT), EngineConfig(**settings, max_slots=16))
    answers = {output.answer.request_id: output.answer for output in engine.run(wanted.values()) if output.answer}
    found = {custom_id: answers[request.request_id] for custom_id, request in wanted.items()}
    return [_essence(each["custom_id"], found.get(each["custom_id"])) for each in asked]


def _essence(custom_id: str, answer) -> tuple:
    if answer is None:
        return custom_id, "invalid"
    return custom_id, answer.text, len(answer.tokens), answer.finish_reason.value, answer.seed
