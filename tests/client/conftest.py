from tests.gateway.conftest import certificates, pair, service, shared

__all__ = ["certificates", "pair", "service", "shared"]
