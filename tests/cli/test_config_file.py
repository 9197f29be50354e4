"""The configuration file of `serve` and `batch`: accepted keys, refused values, and options that override it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from services.batch.config import BatchConfig
from services.cli import options
from services.cli.options import keys_of
from services.cli.service_options import (
    BatchOptions,
    ServeOptions,
    gateway_config,
    worker_group_config,
)
from services.gateway.config import GatewayConfig
from services.launch.config import WorkerGroupConfig
from smc.api.engine_config import EngineConfig

NOT_OPTIONS = {"load", "engine", "defensive_share", "prefix_cache", "page", "near_target"}
"""Fields without a key of their name, in this order: for `bench` only; a group of options; for the library only; the
key is `no_prefix_cache`; the key is `no_page`; set by `batch` itself."""


@pytest.fixture
def file(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "serve.yaml"
        path.write_text(text)
        return path

    return write


def printed(smcserve, *arguments) -> dict:
    ran = smcserve("serve", "--print-config", *arguments)
    assert (ran.code, ran.err) == (0, "")
    return yaml.safe_load(ran.out)


def test_every_option_of_the_configuration_is_a_key():
    """Every field of a configuration class is an option, or named in `NOT_OPTIONS` with the reason."""
    group = {field.name for kind in (WorkerGroupConfig, EngineConfig) for field in fields(kind)} - NOT_OPTIONS
    group |= {"no_prefix_cache", "ray_address"}
    gateway = {field.name for field in fields(GatewayConfig)} - NOT_OPTIONS
    assert group | gateway | {"no_page", "no_http", "gpus", "concurrency"} == keys_of(ServeOptions).keys()
    own = {field.name for field in fields(BatchConfig)} - {"input", "output"}
    assert group | own == keys_of(BatchOptions).keys()


def test_the_effective_configuration_can_be_given_back(smcserve, file):
    given = ("--form", "lockstep", "--device", "cuda", "--served-model-name", "a", "--served-model-name", "b")
    ran = smcserve("serve", "--print-config", *given, "--no-prefix-cache", "--no-page", "--http-port", 0)
    again = smcserve("serve", "--print-config", "--config", file(ran.out))
    assert again.code == 0 and again.out == ran.out
    known = yaml.safe_load(ran.out)
    assert (known["dtype"], known["micro-batches"], known["prefill-chunk"]) == (None, 2, 4096)
    assert (known["served-model-name"], known["no-prefix-cache"], known["http-port"]) == (["a", "b"], True, 0)
    assert known["no-page"] is True and printed(smcserve)["no-page"] is False
    assert (printed(smcserve)["http-port"], printed(smcserve)["no-http"]) == (8000, False)
    methods = [printed(smcserve, *given)["default-method"] for given in ((), ("--default-method", "smc"))]
    assert methods == ["exact", "smc"]
    closed = smcserve("serve", "--print-config", "--no-http")
    assert yaml.safe_load(closed.out)["http-port"] is None
    assert smcserve("serve", "--print-config", "--config", file(closed.out)).out == closed.out
    both = smcserve("serve", "--print-config", "--no-http", "--http-port", 8001)
    assert both.code == 2 and "http_port=8001 is given with no_http; leave one out" in both.err


def test_a_flag_overrides_the_file(smcserve, file):
    path = file("block: 5\nbranches: 2\nkeepalive_time: 90\nmax-queue: 7\nserved-model-name: small\n")
    known = printed(smcserve, "--config", path, "--block", 3)
    assert (known["block"], known["branches"], known["max-queue"]) == (3, 2, 7)
    assert (known["keepalive-time"], known["served-model-name"]) == (90.0, ["small"])
    assert printed(smcserve)["max-queue"] == 256 != printed(smcserve, "--max-queue", 3)["max-queue"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("blok: 3", "unknown key 'blok'. Did you mean block? Allowed: allow-origin, allowed-host, auth-token-file,"),
        ("config: other.yaml", "unknown key 'config'."),
        ("block: eight", "block='eight'; allowed: a whole number"),
        ("block: 8.5", "block=8.5; allowed: a whole number"),
        ("threads: true", "threads=True; allowed: a whole number"),
        ("heartbeat: [1]", "heartbeat=[1]; allowed: a number"),
        ("no-prefix-cache: 1", "no-prefix-cache=1; allowed: true, false"),
        ("host: 5", "host=5; allowed: text"),
        ("tls-key: 5", "tls-key=5; allowed: a path"),
        ("served-model-name: [a, 5]", "served-model-name=['a', 5]; allowed: text, or a list of such"),
        ("block: 99", "block=99; allowed: 1..32"),
        ("heartbeat: 100", "heartbeat=100; allowed: below link_timeout=60"),
        ("prefill_share: 0", "prefill_share=0.0; allowed: above 0"),
        ("max-calls: 1\nmax_calls: 2", "max-calls is given twice, with dashes and with underscores"),
        ("port: 1\nport: 2", "is not YAML: 'port' is given twice"),
        ("port: [", "is not YAML: "),
        ("- port", "holds ['port']; allowed: a mapping of options"),
    ],
)
def test_mistakes(smcserve, file, text, message):
    ran = smcserve("serve", "--config", file(text))
    assert (ran.code, ran.out) == (2, "") and message in ran.err


def test_a_file_that_is_not_there(smcserve, tmp_path):
    for path, why in ((tmp_path / "no.yaml", "no such file or directory"), (tmp_path, "is a directory")):
        ran = smcserve("serve", "--config", path)
        assert ran.code == 2 and f"--config {path}: {why}; give a YAML file of options" in " ".join(ran.err.split())


@pytest.mark.parametrize("text", ["", "# nothing\n", "port: null\n"])
def test_a_file_may_give_nothing(file, text):
    given = options.read_config_file(file(text), ServeOptions)
    assert (worker_group_config(given), gateway_config(given)) == (WorkerGroupConfig(), GatewayConfig(http_port=8000))


def test_batch_reads_one_of_its_own(smcserve, file, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text("")
    output = tmp_path / "out.jsonl"
    assert smcserve("batch", source, output, "--config", file("link-timeout: 30\nconcurrency: 2\n")).code == 0
    assert smcserve("batch", source, output, "--config", file("concurrency: 0\n"), "--concurrency", 2).code == 0
    refused = smcserve("batch", source, output, "--config", file("concurrency: 0\n"))
    assert refused.code == 2 and "concurrency=0; allowed: >= 1" in refused.err
    refused = smcserve("batch", source, output, "--config", file("port: 50051\n"))
    assert refused.code == 2 and "unknown key 'port'" in refused.err


def test_what_few_people_set_is_no_flag(smcserve):
    ran = smcserve("serve", "--keepalive-time", 5)
    assert ran.code == 2 and "No such option: --keepalive-time" in ran.err
    assert "keepalive" not in smcserve("serve", "--help").out
