"""The images' health check asks a service as it is configured: with TLS, tokens, other ports, without HTTP."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.cli.probe import configuration, health, main
from tests.gateway.certificates import Certificates, make_certificates
from tests.gateway.harness import Service, serving, until
from tests.ports import free_ports


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@contextmanager
def container(folder: Path, *words: object) -> Iterator[Path]:
    """A file system of processes with one, which has these words in its command line and runs in `folder`."""
    program = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    process = subprocess.Popen([*program, *map(str, words)], cwd=folder, stdin=subprocess.PIPE)
    try:
        proc = folder / "proc"
        proc.mkdir(exist_ok=True)
        (proc / "meminfo").touch()
        (proc / str(process.pid)).symlink_to(f"/proc/{process.pid}")
        until(lambda: Path(f"/proc/{process.pid}/cmdline").read_text() != "")  # as it is while the program is loaded
        yield proc
        (proc / str(process.pid)).unlink()
    finally:
        process.communicate()


def check(proc: Path, service: Service) -> str:
    """Ask the service before its workers are ready, and afterwards. Return how it has shown that it serves."""
    service.set_health(draft=False, target=False)
    with pytest.raises(ValueError, match=r"503|NOT_SERVING|not smc_serving 1"):
        health(configuration(proc))
    service.set_health(draft=True, target=True)
    return health(configuration(proc))


def tls_of(certificates: Certificates) -> dict[str, Path]:
    return {"tls_cert": certificates["server.crt"], "tls_key": certificates["server.key"]}


def test_flags_and_a_file_beside_the_process(pair, tmp_path, certificates):
    """TLS and tokens from the file, another port from a flag, all paths relative to the process's directory."""
    port, http_port = free_ports(2)
    (tmp_path / "tokens").write_text("secret\n")
    for name, file in tls_of(certificates).items():
        (tmp_path / name).write_bytes(file.read_bytes())
    (tmp_path / "smc.yaml").write_text(
        "host: 0.0.0.0\nhttp-port: 1\ntls-cert: tls_cert\ntls-key: tls_key\nauth-token-file: tokens\n"
        "allowed-host: [api.example.com]\n"
    )
    served = {"host": "0.0.0.0", "auth_token_file": tmp_path / "tokens", "allowed_hosts": ("api.example.com",)}
    words = ("tini", "--", "/opt/bin/smcserve", "serve", "--config=smc.yaml", "--port", port, "--http-port", http_port)
    with (
        serving(pair, port=port, http_port=http_port, **served, **tls_of(certificates)) as service,
        container(tmp_path, *words) as proc,
    ):
        assert check(proc, service) == "/health answers 200"


def test_the_shipped_arguments(pair, tmp_path):
    """Those of the images' CMD, at ports that are free here."""
    port, http_port, metrics_port = free_ports(3)
    words = ("smcserve", "serve", "--host=0.0.0.0", f"--metrics-port={metrics_port}")
    with container(tmp_path, *words) as proc:
        config = configuration(proc)
    assert (config.host, config.port, config.http_port) == ("0.0.0.0", 50051, 8000)
    words += ("--port", port, "--http-port", http_port)
    with serving(pair, port=port, http_port=http_port) as service, container(tmp_path, *words) as proc:
        assert check(proc, service) == "/health answers 200"


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "[::]"])
def test_without_http(pair, tmp_path, host):
    (port,) = free_ports(1)
    words = ("smcserve", "serve", "--no-http", "--host", host, "--port", port)
    with serving(pair, host=host, port=port) as service, container(tmp_path, *words) as proc:
        assert check(proc, service) == "gRPC health is SERVING"


@pytest.mark.parametrize("http", [True, False])
def test_mutual_tls(pair, tmp_path, certificates, http):
    """Without a client's certificate no answer can be had: the metrics port tells, or else a TLS connection counts."""
    port, http_port, metrics_port = free_ports(3)
    tls = tls_of(certificates) | {"tls_client_ca": certificates["ca.crt"]}
    hosts = ("api.example.com",)
    ports = {"port": port, "http_port": http_port if http else None, "metrics_port": metrics_port}
    words = ["smcserve", "serve", "--host", "0.0.0.0", "--port", port]
    words += ["--http-port", http_port] if http else ["--no-http"]
    for name, file in tls.items():
        words += [f"--{name.replace('_', '-')}", file]
    with serving(pair, host="0.0.0.0", allowed_hosts=hosts, **ports, **tls) as service:
        with container(tmp_path, *words, "--allowed-host", *hosts, "--metrics-port", metrics_port) as proc:
            assert check(proc, service) == "/metrics has smc_serving 1"
        with container(tmp_path, *words) as proc:
            assert health(configuration(proc)) == f"port {http_port if http else port} accepts TLS"
    with container(tmp_path, *words) as proc, pytest.raises(OSError):
        health(configuration(proc))


def test_what_cannot_be_asked(tmp_path):
    with container(tmp_path, "smcserve", "batch", "in", "out") as proc, pytest.raises(ValueError, match="healthcheck"):
        configuration(proc)
    with container(tmp_path, "smcserve", "serve", "--port", 0, "--http-port", 0) as proc:
        config = configuration(proc)
    with pytest.raises(ValueError, match="--metrics-port"):
        health(config)


def test_exit_codes(pair, tmp_path, capsys):
    """One line for docker's log, and 0 only if it serves."""
    (http_port,) = free_ports(1)
    with container(tmp_path, "smcserve", "serve", "--http-port", http_port) as proc:
        assert main(proc) == 1
        with serving(pair, http_port=http_port):
            assert main(proc) == 0
    with container(tmp_path, "smcserve", "serve", "--no-such-option") as proc:
        assert main(proc) == 1
    refused, answer, unknown = capsys.readouterr().out.splitlines()
    assert "refused" in refused and answer == "/health answers 200" and "--no-such-option" in unknown
