"""Whole load tests against a real gateway and engine in this process, with every way in which a request can end."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from loadtest.monitor import ProcessTree, parse
from smc.api.engine_config import EngineConfig
from tests.gateway.harness import Service, serving

QUICK = ("--particles", 2, "--output-length", 8, "--settle", 0, "--interval", 0.1)
ENGINE = EngineConfig(block=4, branches=2, max_slots=8)


@contextmanager
def watched(pair, engine=ENGINE, **gateway) -> Iterator[tuple[Service, tuple]]:
    """Start a service, and return it with the options that connect a load test to it."""
    with serving(pair, engine, metrics_port=0, **gateway) as service:
        url = f"http://127.0.0.1:{service.gateway.metrics_port}/metrics"
        yield service, ("--address", service.address, "--metrics", url)


@pytest.mark.slow
def test_answers_cancelled_and_slow_ones(loadtest, pair, tmp_path):
    path = tmp_path / "run.json"
    with watched(pair) as (service, where):
        mix = (
            "--cancel-share",
            0.3,
            "--cancel-after-tokens",
            1,
            "--cancel-by",
            "leave,abort",
            "--slow-share",
            0.3,
            "--slow-pause",
            0.05,
        )
        load = ("--rate", 15, "--requests", 16, "--output-length", 12, "--ignore-eos", "--connections", 2)
        ran = loadtest(*where, *QUICK, *load, *mix, "--goodput", "ttft:60000", "--json", path)
        service.wait_until_free()
        assert (
            service.metric("smc_requests_cancelled_total", by="abort")
            >= 1
            <= service.metric("smc_requests_cancelled_total", by="client")
        )
    written = json.loads(path.read_text())
    ours = written["smcserve"]
    assert ran.code == 0 and "The objective was met" in ran.out
    assert written["num_prompts"] == 16 == written["completed"] + ours["cancelled"]
    assert ours["cancelled"] >= 3 and sum(request["slow_reader"] for request in ours["requests"]) >= 3
    assert ours["codes"] == {"OK": written["completed"], "CANCELLED": ours["cancelled"]}
    for request, tokens in zip(ours["requests"], written["output_lens"]):
        assert request["cancelled_by_us"] or (tokens == 12 and request["finish_reason"] == "length")
    assert max(sample["running"] for sample in ours["samples"]) >= 1
    assert ours["after"]["metrics"]["smc_generation_tokens_total"] >= written["total_output_tokens"]
    assert 0 < ours["ess_share"] <= 1 <= ours["rounds"]


@pytest.mark.slow
def test_a_full_queue_refuses_and_a_deadline_ends(loadtest, pair, tmp_path):
    path = tmp_path / "run.json"
    long = (
        "--rate",
        40,
        "--requests",
        30,
        "--particles",
        8,
        "--output-length",
        300,
        "--ignore-eos",
        "--deadline",
        0.7,
        "--settle",
        0,
    )
    with watched(pair, EngineConfig(block=4, branches=2, max_slots=8, max_queue=2)) as (service, where):
        ran = loadtest(*where, *long, "--json", path, "--goodput", "ttft:10", "--attainment", 0)
        service.wait_until_free()
    codes = json.loads(path.read_text())["smcserve"]["codes"]
    assert ran.code in (0, 1) and set(codes) <= {"OK", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}
    assert codes["RESOURCE_EXHAUSTED"] >= 5 and codes["DEADLINE_EXCEEDED"] >= 1


@pytest.mark.slow
def test_a_missed_objective_is_exit_code_1(loadtest, pair):
    with watched(pair) as (_, where):
        ran = loadtest(*where, *QUICK, "--rate", 20, "--requests", 3, "--goodput", "ttft:0.001")
    assert ran.code == 1 and "Failed: objective: time to first token at most 0.001 ms: 0 of 3" in ran.out


@pytest.mark.slow
def test_the_same_run_twice_asks_and_is_answered_the_same(loadtest, pair, tmp_path):
    written = []
    with watched(pair) as (_, where):
        for name in "ab":
            loadtest(*where, *QUICK, "--rate", 40, "--requests", 5, "--seed", 3, "--json", tmp_path / name)
            written.append(json.loads((tmp_path / name).read_text()))
    first, second = (
        [(r["seed"], r["planned_at"], r["finish_reason"]) for r in run["smcserve"]["requests"]] for run in written
    )
    assert first == second and written[0]["output_lens"] == written[1]["output_lens"]


def test_a_trace_is_followed(loadtest, pair, tmp_path):
    trace, path = tmp_path / "trace.jsonl", tmp_path / "run.json"
    lines = [{"time": 0.1 * i, "prompt": "1 + 1 =", "max_tokens": i + 1} for i in range(5)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    with watched(pair) as (_, where):
        ran = loadtest(
            *where,
            *QUICK,
            "--arrivals",
            "trace",
            "--trace",
            trace,
            "--ignore-eos",
            "--json",
            path,
        )
    written = json.loads(path.read_text())
    assert ran.code == 0 and written["output_lens"] == [1, 2, 3, 4, 5] and written["request_rate"] is None
    assert [request["planned_at"] for request in written["smcserve"]["requests"]] == pytest.approx(
        [0.0, 0.1, 0.2, 0.3, 0.4]
    )


def test_a_token_over_tls(loadtest, pair, certificates, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text("secret\n")
    secure = {"tls_cert": certificates["server.crt"], "tls_key": certificates["server.key"], "auth_token_file": tokens}
    with serving(pair, ENGINE, **secure) as service:
        where = (
            *QUICK,
            "--rate",
            20,
            "--requests",
            2,
            "--address",
            service.address,
            "--tls-ca",
            certificates["ca.crt"],
        )
        assert loadtest(*where, "--token-file", tokens).code == 0
        ran = loadtest(*where)
        assert ran.code == 2 and "refused the credentials" in ran.err and "give --token-file" in ran.err


def test_a_service_that_is_not_ready_or_has_no_metrics(loadtest, pair):
    with serving(pair, ENGINE, ready=False) as service:
        ran = loadtest(*QUICK, "--rate", 1, "--requests", 1, "--address", service.address)
        assert ran.code == 3 and "is not serving" in ran.err
        service.set_health(draft=True, target=True)
        where = (*QUICK, "--rate", 1, "--requests", 1, "--address", service.address, "--metrics")
        ran = loadtest(*where, "http://127.0.0.1:1/metrics")
        assert ran.code == 3 and "no metrics at http://127.0.0.1:1/metrics" in ran.err


def test_a_service_that_is_starting_is_waited_for(loadtest, pair):
    with serving(pair, ENGINE, ready=False) as service:
        where = (*QUICK, "--rate", 20, "--requests", 2, "--address", service.address, "--wait")
        ran = loadtest(*where, 0.6)
        assert ran.code == 3 and "within 0.6 s: NOT_SERVING" in ran.err
        threading.Timer(0.8, service.set_health, (True, True)).start()
        assert loadtest(*where, 20).code == 0


def test_capacity_is_found_and_reported(loadtest, pair, tmp_path):
    """With a queue of length one, a rate that is too high is refused, however fast the machine is."""
    path, picture = tmp_path / "capacity.json", tmp_path / "capacity.png"
    short = (
        "--duration",
        0.5,
        "--warm-up",
        0,
        "--settle",
        0,
        "--arrivals",
        "constant",
        "--attainment",
        0.9,
        "--precision",
        1,
    )
    with watched(pair, EngineConfig(block=4, branches=2, max_slots=2, max_queue=1)) as (_, where):
        ask = ("--find-capacity", "--rate", 4, "--particles", 2, "--output-length", 4, "--goodput", "e2el:20000")
        ran = loadtest(*where, *ask, *short, "--json", path, "--picture", picture)
    found = json.loads(path.read_text())["smcserve"]["capacity"]
    assert ran.code == 0 and ran.out.splitlines()[-1].startswith("Capacity: ")
    assert 0 < found["low"] < found["high"] <= 2 * found["low"] * (1 + 1e-9)
    assert ran.out.count(" requests/s: ") == len(found["probes"]) and picture.stat().st_size > 10_000


class Broken:
    """A backend that fails every request."""

    def __init__(self, backend) -> None:
        self._backend = backend

    async def generate(self, request):
        raise RuntimeError("broken on purpose")
        yield


@pytest.mark.parametrize("search", [(), ("--find-capacity", "--goodput", "ttft:20000")])
def test_a_broken_service_is_exit_code_1_at_any_rate(loadtest, pair, search, tmp_path):
    files = ("--json", tmp_path / "run.json", *(() if search else ("--picture", tmp_path / "run.png")))
    with serving(pair, ENGINE, wrap=Broken) as service:
        ran = loadtest(
            "--address", service.address, "--rate", 20, "--duration", 0.3, "--warm-up", 0, *QUICK, *search, *files
        )
    assert ran.code == 1 and re.search(r"errors: failed: \d+ INTERNAL", ran.out)
    assert json.loads((tmp_path / "run.json").read_text())
    assert search or (tmp_path / "run.png").stat().st_size > 1000


def test_metrics_are_read_without_buckets():
    series = (
        'smc_x{a="b",model_name="m"} 2.5',
        'smc_y_bucket{le="+Inf"} 3',
        "smc_y_sum 1e3",
        "python_info 1",
        "process_open_fds 7",
    )
    text = "# HELP smc_x y\n" + "".join(f"{line}\n" for line in series)
    assert parse(text) == {'smc_x{a="b"}': 2.5, "smc_y_sum": 1000.0, "process_open_fds": 7.0}


def test_memory_of_a_process_tree():
    held = ProcessTree(psutil.Process().pid).held()
    assert held["gateway"].threads > 0 and held["gateway"].files > 0
    assert held["gateway"].resident == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    with pytest.raises(ValueError, match="there is no such process"):
        ProcessTree(2**22 + 1)
