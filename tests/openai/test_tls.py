"""TLS over HTTP with the certificates that gRPC uses: the server's, the clients', and renewed ones."""

from __future__ import annotations

import http.client
import ssl

import pytest

from tests.gateway.certificates import Certificates, make_certificates
from tests.gateway.harness import Service, serving


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def reaches(service: Service, authority, client: tuple | None = None) -> bool:
    context = ssl.create_default_context(cafile=authority)
    if client:
        context.load_cert_chain(*client)
    connection = http.client.HTTPSConnection("127.0.0.1", service.gateway.http_port, timeout=10, context=context)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (ssl.SSLError, ConnectionError):
        return False
    finally:
        connection.close()


def test_clients_with_certificates(pair, certificates):
    names = {"tls_cert": "server.crt", "tls_key": "server.key", "tls_client_ca": "ca.crt"}
    with serving(pair, http_port=0, **{field: certificates[name] for field, name in names.items()}) as service:
        known, stranger = (
            (certificates[f"{name}.crt"], certificates[f"{name}.key"]) for name in ("client", "stranger")
        )
        assert reaches(service, certificates["ca.crt"], known)
        assert not reaches(service, certificates["ca.crt"], stranger)
        assert not reaches(service, certificates["ca.crt"])


def test_renewed_certificates_hold_for_new_connections(pair, certificates, tmp_path):
    """New connections use a renewed certificate. While only one of its two files has been replaced, the old pair stays
    in use."""
    cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"

    def write(name: str) -> None:
        path = cert if name.endswith("crt") else key
        path.with_suffix(".new").write_bytes(certificates[name].read_bytes())
        path.with_suffix(".new").replace(path)

    write("server.crt")
    write("server.key")
    with serving(pair, http_port=0, tls_cert=cert, tls_key=key) as service:
        assert reaches(service, certificates["ca.crt"]) and not reaches(service, certificates["other_ca.crt"])
        write("stranger.crt")
        assert reaches(service, certificates["ca.crt"])
        write("stranger.key")
        assert reaches(service, certificates["other_ca.crt"]) and not reaches(service, certificates["ca.crt"])
