"""`smcserve client` as its user sees it: answers, health, information and mistakes, with exit codes 0, 1 and 2."""

from __future__ import annotations

import io
import json
import re

import pytest

from services.connection_options import DEFAULT_ADDRESS
from services.gateway.config import GatewayConfig
from smc.demo.problems import generate
from tests.gateway.harness import LONG, PLAIN_CONFIG, local_answer, serving

QUESTION = generate(1, 1, "test")[0].question


@pytest.fixture
def client(smcserve, service):
    return lambda command, *arguments: smcserve("client", command, *arguments, "--address", service.address)


def test_text_on_stdout_and_statistics_on_stderr(client, pair):
    ran = client("generate", QUESTION, "--method", "smc", "-n", 4, "--seed", 3)
    expected = local_answer(
        pair, pair.tokenizer.chat([{"role": "user", "content": QUESTION}]), method="smc", particles=4, seed=3
    )
    assert (ran.code, ran.out) == (0, expected.text + "\n")
    for part in (r"\d+ tokens in ", r"\d+ rounds", r"mean ESS \d+% of N=4", r"log Z -?\d", "ended by eos", "seed 3"):
        assert re.search(part, ran.err), part


def test_the_same_as_in_process(client, smcserve):
    engine = ("-k", PLAIN_CONFIG.block, "-f", PLAIN_CONFIG.branches)
    short = ("--max-tokens", 12)
    for options in (
        ("--seed", 5),
        ("--method", "smc", "--population", "independent", "--seed", 6, "--raw"),
        ("--method", "target", "--temperature", 0, "--stop", "="),
    ):
        local = engine if "target" not in options else ("-k", PLAIN_CONFIG.block)
        ran = smcserve("generate", QUESTION, *options, *short, *local)
        assert client("generate", QUESTION, *options, *short).out == ran.out


def test_json(client):
    ran = client(
        *("generate", QUESTION, "--method", "smc", "-n", 4, "--seed", 3),
        "--json",
        "--logprobs",
        "--top-logprobs",
        2,
        "--request-id",
        "mine",
    )
    answer = json.loads(ran.out)
    assert (ran.code, ran.err) == (0, "")
    assert (answer["request_id"], answer["finish_reason"], answer["matched"], answer["seed"]) == ("mine", "eos", 1, 3)
    assert answer["usage"]["answer_tokens"] == len(answer["tokens"]) == len(answer["logprobs"])
    assert [len(tops) for tops in answer["top_logprobs"]] == [2] * len(answer["tokens"])
    assert (
        answer["statistics"]["particles"] == 4 and answer["usage"]["cached_tokens"] <= answer["usage"]["prompt_tokens"]
    )
    short = ("--max-tokens", 8)
    salted = [
        json.loads(
            client(
                "generate", QUESTION, "--json", "--cache-salt", "mine", "--method", "smc", "--min-particles", 1, *short
            ).out
        )
        for _ in range(2)
    ]
    assert [each["usage"]["cached_tokens"] > 0 for each in salted] == [False, True]
    plain = json.loads(client("generate", QUESTION, "--method", "target", "--json", *short).out)
    assert plain["statistics"] is None and "logprobs" not in plain


def test_prompt_on_standard_input(client, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(QUESTION + "\n"))
    short = ("--seed", 5, "--max-tokens", 10)
    assert client("generate", *short).out == client("generate", QUESTION, *short).out


def test_health(client, smcserve, pair):
    ran = client("health")
    assert ran.code == 0 and re.search(r"the service +SERVING\s+draft group +SERVING\s+target group +SERVING", ran.out)
    with serving(pair, ready=False) as starting:
        starting.set_health(draft=True, target=False)
        ran = smcserve("client", "health", "--json", "--address", starting.address)
    assert ran.code == 1
    assert json.loads(ran.out) == {
        "the service": "NOT_SERVING",
        "draft group": "SERVING",
        "target group": "NOT_SERVING",
    }


def test_info(client):
    ran = client("info")
    for part in (
        r"target +demo-target \(llama, [\d,]+ parameters, TP 1\)",
        r"max context +512",
        r"form +lookahead",
        r"incarnation +3",
    ):
        assert re.search(part, ran.out), part
    found = json.loads(client("info", "--json").out)
    assert found["models"]["draft"]["name"] == "demo-draft" and found["server"]["max_slots"] == 64


def test_a_token_and_tls(smcserve, pair, certificates, tmp_path):
    (tmp_path / "tokens").write_text("# mine\nsecret\n")
    tls = {
        "tls_cert": certificates["server.crt"],
        "tls_key": certificates["server.key"],
        "tls_client_ca": certificates["ca.crt"],
    }
    with serving(pair, auth_token_file=tmp_path / "tokens", **tls) as service:
        shown = (
            "--tls-ca",
            certificates["ca.crt"],
            "--tls-cert",
            certificates["client.crt"],
            "--tls-key",
            certificates["client.key"],
        )
        where = ("--address", service.address, *shown)
        assert (
            smcserve("client", "generate", "x", *where, "--token-file", tmp_path / "tokens", "--max-tokens", 2).code
            == 0
        )
        ran = smcserve("client", "info", *where)
        assert ran.code == 2 and ran.err.startswith("error: UNAUTHENTICATED: ")
        assert smcserve("client", "health", *where).code == 0
        assert smcserve("client", "health", "--address", service.address).code == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--particles", 0), "INVALID_ARGUMENT: particles=0; allowed: 1..64"),
        (("--max-tokens", 10**6), "INVALID_ARGUMENT: max_tokens=1000000 after a prompt"),
        (("--method", "beam"), "method='beam'; allowed: smc, exact, target, draft"),
        (("--particles", "few"), "'--particles'.*valid integer.*smcserve client generate --help"),
        (("--logprobs",), "--logprobs has no effect without --json"),
        (("--timeout", 0), "--timeout 0; allowed: above 0 seconds"),
        (("--token-file", "nowhere"), "--token-file='nowhere': No such file"),
        (("--tls-cert", "nowhere"), "tls_cert is given without tls_key"),
        (("--tls-ca", "nowhere"), "No such file.*nowhere"),
        (("--block", 3), "No such option: --block"),
    ],
)
def test_mistakes(client, arguments, message):
    ran = client("generate", QUESTION, *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: ") and re.search(message, ran.err) and "Traceback" not in ran.err


def test_failures_of_the_service(smcserve, client, pair):
    ran = smcserve("client", "generate", QUESTION, "--address", "localhost:1")
    assert ran.code == 1 and ran.err.startswith(
        "error: no service answers at localhost:1; `smcserve serve` starts a service (UNAVAILABLE: "
    )
    ran = smcserve("client", "health", "--address", "localhost:1")
    assert ran.code == 1 and ran.err.startswith("error: no service answers at localhost:1")
    ran = client("generate", QUESTION, "--timeout", 0.2, "-n", LONG["particles"], "--max-tokens", 400, "--ignore-eos")
    assert ran.code == 1 and "error: DEADLINE_EXCEEDED" in ran.err
    with serving(pair, ready=False) as starting:
        ran = smcserve("client", "generate", QUESTION, "--address", starting.address)
    assert ran.code == 1 and "(try again in 1 s)" in ran.err


def test_no_command_is_a_mistake(smcserve):
    ran = smcserve("client")
    assert ran.code == 2 and "Missing command" in ran.err


def test_the_address_is_where_a_service_listens_by_default():
    config = GatewayConfig()
    assert f"{config.host}:{config.port}" == DEFAULT_ADDRESS
