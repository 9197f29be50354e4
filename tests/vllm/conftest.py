from __future__ import annotations

from tests.gateway.conftest import certificates, pair, service, shared  # noqa: F401
