"""The hosts of HTTP requests. A page of another site can make a browser send requests to a service on its machine under
a name of its own, whose address it changes to 127.0.0.1 (DNS rebinding): then the header Host has that name."""

from __future__ import annotations

import http.client
import json
import re

import pytest

from services.gateway.config import GatewayConfig
from services.openai.bodies import CHAT
from tests.gateway.harness import Service, serving
from tests.openai.asking import Said, ask, chat, is_error, post

OWN = ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1", "127.0.0.1:8000", "127.8.0.1", "[::1]", "[::1]:8000"]
OTHERS = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "10.0.0.1",
    "[::2]",
    "a b",
]
REFUSED = "host='evil.example' is not a name of this service; allowed: localhost, 127.0.0.1, [::1]"


def asked(service: Service, host: str, path: str = "/v1/models") -> Said:
    return ask(service, "GET", path, host=host)


@pytest.mark.parametrize("host", OWN)
def test_names_of_the_machine_itself(service, host):
    assert asked(service, host).status == 200
    assert post(service, chat(max_tokens=2), host=host).status == 200


@pytest.mark.parametrize("host", OTHERS)
def test_other_names_are_refused(service, host):
    is_error(asked(service, host), 403, "host", "is not a name of this service")
    is_error(post(service, chat(max_tokens=2), host=host), 403, "host", "is not a name of this service")


def test_the_error_names_the_option(service):
    for path in ("/", "/metrics", "/nothing", "/v1/models"):
        said = asked(service, "evil.example", path)
        is_error(said, 403, "host", re.escape(f"{REFUSED}; another name is allowed by --allowed-host"))
    said = post(service, chat(max_tokens=2), "/v1/messages", host="evil.example")
    assert said.status == 403 and said.json["error"]["type"] == "permission_error"
    assert asked(service, "evil.example", "/health").status == 200, "probes may use any name"
    assert "x" * 100 not in asked(service, "evil.example" + "x" * 5000).error["message"]


def test_a_request_without_host(service):
    """Only old programs leave it out; browsers never do."""
    connection = http.client.HTTPConnection("127.0.0.1", service.gateway.http_port, timeout=60)
    connection.putrequest("POST", CHAT, skip_host=True)
    body = chat(max_tokens=2)
    connection.putheader("content-type", "application/json")
    connection.putheader("content-length", str(len(body)))
    connection.endheaders(body)
    assert connection.getresponse().status in (200, 400)
    connection.close()


def test_configured_names(pair):
    hosts = ("llm.example", "Other.Example", "10.0.0.1")
    with serving(pair, http_port=0, allowed_hosts=hosts) as service:
        for host in ("llm.example", "llm.example:443", "OTHER.example", "10.0.0.1:80", "localhost"):
            assert asked(service, host).status == 200, host
        is_error(asked(service, "evil.example"), 403, "host", re.escape("[::1], llm.example, Other"))
    with serving(pair, http_port=0, allowed_hosts=("*",)) as service:
        assert asked(service, "evil.example").status == 200


def test_where_any_name_is_allowed(pair, tmp_path):
    """A page cannot send a token that it does not know; a service on a network is called by names that it cannot
    know. Configured names are demanded there, too."""
    path = tmp_path / "tokens"
    path.write_text("sesame\n")
    with serving(pair, http_port=0, auth_token_file=path) as service:
        is_error(asked(service, "evil.example"), 401, "unauthenticated", "a valid token is needed")
        assert ask(service, "GET", "/v1/models", host="evil.example", authorization="Bearer sesame").status == 200
    with serving(pair, http_port=0, host="0.0.0.0") as service:
        assert asked(service, "llm.example").status == 200
    with serving(pair, http_port=0, host="0.0.0.0", allowed_hosts=("llm.example",)) as service:
        assert asked(service, "llm.example").status == 200
        is_error(asked(service, "evil.example"), 403, "host", "allowed: llm.example")


def test_the_port_of_the_metrics(pair):
    with serving(pair, metrics_port=0) as service:

        def scraped(host: str) -> int:
            connection = http.client.HTTPConnection("127.0.0.1", service.gateway.metrics_port, timeout=60)
            connection.request("GET", "/metrics", headers={"host": host})
            status = connection.getresponse().status
            connection.close()
            return status

        assert [scraped(host) for host in ("localhost:9400", "127.0.0.1", "evil.example")] == [200, 200, 403]


@pytest.mark.parametrize("host", ["", "https://llm.example", "llm.example/v1", "a b", "llm.example:443"])
def test_what_is_no_name(host):
    with pytest.raises(ValueError, match="allowed_hosts contains"):
        GatewayConfig(http_port=0, allowed_hosts=(host,))


def test_every_way_of_refusing_is_counted(service):
    before = _refused(service)
    asked(service, "evil.example")
    assert _refused(service) == before + 1


def _refused(service: Service) -> float:
    (line,) = [
        line
        for line in service.metrics.exposition().decode().splitlines()
        if line.startswith("smc_requests_rejected_total{") and 'cause="host"' in line
    ]
    return float(json.loads(line.rpartition(" ")[2]))
