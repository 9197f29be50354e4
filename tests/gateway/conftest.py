from __future__ import annotations

import pytest

from smc import demo
from smc.local_engine import ModelPair
from tests.gateway.certificates import Certificates, make_certificates
from tests.gateway.harness import serving


@pytest.fixture(scope="session")
def pair() -> ModelPair:
    return ModelPair.load(demo.TARGET, demo.DRAFT)


@pytest.fixture(scope="session")
def shared(pair):
    """A service that tests share; each test leaves it as it found it."""
    with serving(pair) as service:
        yield service


@pytest.fixture
def service(shared):
    yield shared
    shared.wait_until_free()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))
