from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.backend import ServingPair
from services.launch.config import WorkerGroupConfig
from tests.batch.running import Cluster


@pytest.fixture(scope="session")
def pair() -> ServingPair:
    """The demo pair, as a run sees it before any model is loaded."""
    return WorkerGroupConfig().serving_pair()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    """One cluster with a dashboard for the tests of a file, started as a user starts one, and gone before others start
    theirs."""
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
