"""Access by tokens, TLS and mutual TLS. Security settings that would have no effect stop the start."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.client import Client, ServiceError
from services.gateway.config import GatewayConfig
from services.security import is_known, is_loopback, read_tokens
from tests.gateway.harness import LONG, serving

TOKEN = "s3cret-token"


@pytest.fixture
def token_file(tmp_path):
    file = tmp_path / "tokens"
    file.write_text(f"# those of the team\n\n{TOKEN}\n  another \n")
    return file


def test_a_known_token_lets_in(pair, token_file):
    with serving(pair, auth_token_file=token_file) as service:
        for token in (TOKEN, "another"):
            with service.client(token=token) as client:
                assert client.generate("x", max_tokens=2, particles=1).usage.completion_tokens
                assert client.server_info().serving and client.model_info() and not client.abort("x")


@pytest.mark.parametrize(
    "metadata",
    [(), (("authorization", "Bearer wrong"),), (("authorization", TOKEN),), (("authorization", f"Basic {TOKEN}"),)],
)
def test_methods_require_token(pair, token_file, metadata):
    """Without a valid token every method is refused, also reflection and methods that do not exist. Health checks need
    no token."""
    with serving(pair, auth_token_file=token_file) as service, grpc.insecure_channel(service.address) as channel:
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        calls = [
            *(
                channel.unary_unary(f"/smc.v1.GenerationService/{name}")
                for name in ("Abort", "GetModelInfo", "GetServerInfo", "Nothing")
            ),
            lambda data, metadata: next(
                channel.unary_stream("/smc.v1.GenerationService/Generate")(data, metadata=metadata)
            ),
            lambda data, metadata: next(reflection.ServerReflectionInfo(ask, metadata=metadata)),
        ]
        for call in calls:
            with pytest.raises(grpc.RpcError) as caught:
                call(b"", metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert "Bearer TOKEN" in caught.value.details() and TOKEN not in caught.value.details()
        assert service.metric("smc_requests_rejected_total", code="UNAUTHENTICATED", cause="unauthenticated") == len(
            calls
        )
        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
        assert next(health.Watch(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING


def test_ids_belong_to_the_token_that_they_came_with(pair, token_file):
    """Callers with different tokens can use the same request id, and each can abort only its own request."""
    with serving(pair, auth_token_file=token_file) as service:
        mine, other = service.client(token=TOKEN), service.client(token="another")
        with (
            mine,
            other,
            mine.stream("x", request_id="job", **LONG) as stream,
            other.stream("x", request_id="job", **LONG) as theirs,
        ):
            next(stream)
            next(theirs)
            assert other.abort("job") and not other.abort("job")
            with pytest.raises(ServiceError, match="the request was aborted"):
                list(theirs)
            assert next(stream) and mine.abort("job")
        service.wait_until_free()


def test_reflection_with_a_token(pair, token_file):
    with serving(pair, auth_token_file=token_file) as service, grpc.insecure_channel(service.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        answer = next(stub.ServerReflectionInfo(ask, metadata=(("authorization", f"bearer {TOKEN}"),)))
        assert "smc.v1.GenerationService" in {s.name for s in answer.list_services_response.service}


def test_tls_with_a_token(pair, certificates, token_file):
    tls = {"tls_cert": certificates["server.crt"], "tls_key": certificates["server.key"]}
    with serving(pair, auth_token_file=token_file, **tls) as service:
        with service.client(tls_ca=certificates["ca.crt"], token=TOKEN) as client:
            assert client.generate("x", max_tokens=2, particles=1).tokens
        with (
            service.client(tls_ca=certificates["other_ca.crt"], token=TOKEN) as client,
            pytest.raises(ServiceError, match="UNAVAILABLE"),
        ):
            client.server_info()
        with service.client() as client, pytest.raises(ServiceError, match="UNAVAILABLE"):
            client.server_info()


def test_mutual_tls(pair, certificates):
    names = {"tls_cert": "server.crt", "tls_key": "server.key", "tls_client_ca": "ca.crt"}
    with serving(pair, **{field: certificates[name] for field, name in names.items()}) as service:
        known = {
            "tls_ca": certificates["ca.crt"],
            "tls_cert": certificates["client.crt"],
            "tls_key": certificates["client.key"],
        }
        stranger = {**known, "tls_cert": certificates["stranger.crt"], "tls_key": certificates["stranger.key"]}
        with service.client(**known) as client:
            assert client.generate("x", max_tokens=2, particles=1).tokens
        for options in (stranger, {"tls_ca": certificates["ca.crt"]}):
            with service.client(**options) as client, pytest.raises(ServiceError, match="UNAVAILABLE"):
                client.server_info()


def test_renewed_certificates_hold_for_new_connections(pair, certificates, tmp_path):
    """New connections use a renewed certificate. While only one of its two files has been replaced, the old pair stays
    in use; open connections are left alone."""
    cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"

    def write(path: Path, name: str) -> None:
        path.with_suffix(".new").write_bytes(certificates[name].read_bytes())
        path.with_suffix(".new").replace(path)

    def reaches(service, authority: str) -> bool:
        with service.client(tls_ca=certificates[authority]) as client:
            try:
                return client.health() == "SERVING"
            except ServiceError:
                return False

    write(cert, "server.crt")
    write(key, "server.key")
    with serving(pair, tls_cert=cert, tls_key=key) as service, service.client(tls_ca=certificates["ca.crt"]) as old:
        assert old.health() == "SERVING" and not reaches(service, "other_ca.crt")
        write(cert, "stranger.crt")
        assert reaches(service, "ca.crt") and not reaches(service, "other_ca.crt")
        write(key, "stranger.key")
        assert reaches(service, "other_ca.crt") and not reaches(service, "ca.crt")
        assert old.health() == "SERVING", "connections that stand are left alone"


def test_settings_without_effect_stop_the_start(certificates, token_file, tmp_path):
    cert, key = certificates["server.crt"], certificates["server.key"]
    (tmp_path / "empty").write_text("# nobody yet\n")
    (tmp_path / "spaced").write_text("fine\nnot fine\n")
    for settings, message in (
        ({"tls_cert": cert}, "tls_cert is given without tls_key"),
        ({"tls_key": key}, "tls_key is given without tls_cert"),
        ({"tls_client_ca": cert}, "tls_client_ca has no effect without TLS"),
        ({"tls_cert": cert, "tls_key": tmp_path / "none"}, "tls_key='.*none': No such file"),
        ({"tls_cert": cert, "tls_key": certificates["client.key"]}, "(?i)tls_cert=.*mismatch.*its own key"),
        ({"tls_cert": token_file, "tls_key": key}, "tls_cert=.*PEM"),
        ({"tls_cert": cert, "tls_key": key, "tls_client_ca": token_file}, "tls_client_ca=.*PEM"),
        ({"auth_token_file": tmp_path / "none"}, "auth_token_file='.*none': No such file"),
        ({"auth_token_file": tmp_path}, "auth_token_file=.*: Is a directory"),
        ({"auth_token_file": tmp_path / "empty"}, "holds no token"),
        ({"auth_token_file": tmp_path / "spaced"}, "line 2 is not a token"),
        ({"auth_token_file": token_file, "host": "0.0.0.0"}, "plain text on host='0.0.0.0'.*--tls-cert.*127.0.0.1"),
    ):
        with pytest.raises(ValueError, match=message):
            GatewayConfig(**settings)
    GatewayConfig(host="0.0.0.0", auth_token_file=token_file, tls_cert=cert, tls_key=key)
    tokens = GatewayConfig(auth_token_file=str(token_file)).token_file()
    assert tokens.knows(TOKEN) and tokens.knows("another") and not tokens.knows("") and not tokens.knows("#")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": 70000}, r"port=70000; allowed: 0..65535"),
        ({"port": "80"}, "port='80'; allowed"),
        ({"metrics_port": -1}, "metrics_port=-1; allowed"),
        ({"port": 9000, "metrics_port": 9000}, "metrics_port=9000 is given as port as well"),
        ({"host": ""}, "host=''; allowed"),
        ({"max_message_bytes": 0}, "max_message_bytes=0; allowed: 1024.."),
        ({"max_concurrent_streams": 0}, "max_concurrent_streams=0; allowed"),
        ({"keepalive_time": 0.1}, "keepalive_time=0.1; allowed: at least 1 seconds"),
        ({"write_timeout": 0}, "write_timeout=0; allowed"),
        ({"drain_timeout": -1}, "drain_timeout=-1; allowed: at least 0"),
        ({"drain_timeout": float("inf")}, "drain_timeout=inf; allowed"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        GatewayConfig(**settings)


def test_port_in_use_error(service, pair):
    with (
        pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{service.gateway.port}"),
        serving(pair, port=service.gateway.port),
    ):
        pass


def test_tokens_and_hosts():
    assert is_known("b", ("a", "b")) and not is_known("", ("a",)) and not is_known("ä", ("a",))
    assert all(map(is_loopback, ("127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "")))


def test_the_client_keeps_tokens_off_the_network(certificates):
    with pytest.raises(ValueError, match="plain text"):
        Client("example.org:50051", token=TOKEN)
    for target, options in (
        ("127.0.0.1:1", {}),
        ("dns:///localhost:1", {}),
        ("[::1]:1", {}),
        ("example.org:1", {"tls": True}),
    ):
        Client(target, token=TOKEN, **options).close()
    with pytest.raises(ValueError, match="tls_cert is given without tls_key"):
        Client("localhost:1", tls_cert=certificates["client.crt"])


def test_a_token_never_shows_in_a_message(tmp_path):
    (tmp_path / "tokens").write_text("se cret\n")
    with pytest.raises(ValueError, match="--token-file") as caught:
        read_tokens(tmp_path / "tokens", "--token-file")
    assert "cret" not in str(caught.value).replace("--token-file", "")
