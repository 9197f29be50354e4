"""The metrics page: names that Prometheus' linter accepts, series that exist from the start, and values that match what
happened."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import subprocess
import threading
import urllib.request
from dataclasses import replace
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from loadtest.monitor import parse
from services.cli.distill import logged_prompts
from services.client import Message, ServiceError
from services.coordinator.messages import STEPS, EngineStep
from services.launch import supervisor as launch
from services.launch.config import WorkerGroupConfig
from services.metrics import Metrics
from smc.api.request import Answer, FinishReason, Statistics, Times
from smc.local_engine import local_engine
from smc.potentials import Prefixes
from smc.scheduler.stats import EngineStats, RoundTimes
from tests.deploy.binaries import binary
from tests.deploy.sources import rules
from tests.gateway.harness import LONG, serving, until, value_of
from tests.scheduler.harness import CASES, answers, request
from tests.scheduler.pairs import tiny_pair

WEIGHTS = {"target": "ab", "draft": "cd"}
ANSWER = Answer(
    "r",
    (1,) * 7,
    "x",
    FinishReason.EOS,
    1,
    1,
    20,
    Statistics(4, draft_tokens=160, target_tokens=40),
    1.5,
    times=Times(0.1, 0.2, 1.2),
)


@pytest.fixture
def metrics():
    return Metrics()


def value(metrics: Metrics, name: str, **labels: str) -> float:
    found = value_of(metrics, name, labels)
    assert found is not None, (name, labels)
    return found


def names(metrics: Metrics) -> set[str]:
    return {metric.name for metric in metrics.page.collect()}


def test_promtool_accepts_every_name(metrics):
    ran = subprocess.run([binary("promtool"), "check", "metrics"], input=metrics.exposition(), capture_output=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"", b"")


def test_every_name_is_ours_or_the_process(metrics):
    assert all(re.match(r"(smc|process)_", name) for name in names(metrics))
    assert "_created" not in metrics.exposition().decode()


def test_series_exist_from_the_start_and_no_others_come(metrics):
    """Reporting everything that can be reported creates no new series, so label values come from fixed sets."""

    def series() -> set[tuple]:
        return {
            (s.name, *sorted(s.labels.items()))
            for m in metrics.page.collect()
            for s in m.samples
            if m.name != "smc_build"
        }

    metrics.set_build_info("1.2", "big", "lookahead", "grpc", 64, block=3, weights=WEIGHTS, placement="apart")
    before = series()
    report_everything(metrics)
    assert series() == before


def test_each_worker_group_has_its_series():
    """Two worker groups share families, which promtool accepts, also where a scraper asks for some by name."""
    metrics = Metrics(2)
    report_everything(metrics)
    metrics.groups[1].observe_step(EngineStats(queued=7))
    ran = subprocess.run([binary("promtool"), "check", "metrics"], input=metrics.exposition(), capture_output=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"", b"")
    for page in (metrics.page, metrics.page.restricted_registry(iter(["smc_requests_queued", "smc_serving"]))):
        families = {family.name: family for family in page.collect()}
        queued = {sample.labels["worker_group"]: sample.value for sample in families["smc_requests_queued"].samples}
        assert queued == {"0": 3, "1": 7} and "worker_group" not in families["smc_serving"].samples[0].labels
    assert len(list(metrics.page.collect())) == len(names(metrics))


def test_metrics_of_a_pair_name_it(metrics):
    """Windows over a restart with another draft do not mix two drafts: what says how well a draft fits has a label
    with the weights of both models, which the service's description has, too. No other metric has it."""
    report_everything(metrics)
    labelled = set()
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            if "pair" in sample.labels:
                assert sample.labels["pair"] == "ab-cd" and sample.labels["model_name"] == "big"
                labelled.add(family.name)
    assert {"smc_build_info", "smc_log_evidence_per_token", "smc_ess_share_ratio", "smc_collapses"} <= labelled
    assert {"smc_spec_decode_num_drafts", "smc_spec_decode_num_accepted_tokens_per_pos"} <= labelled
    assert not {"smc_slots_free", "smc_requests", "smc_e2e_request_latency_seconds"} & labelled
    recorded = [rule["expr"] for rule in rules("rules.yml") if "_pair:" in rule["record"]]
    read = {name for expr in recorded for name in re.findall(r"\b(smc_\w+?)(?:_total|_bucket|_count)\b", expr)}
    assert read and read <= labelled, "rules by pair read only what has the label"


def report_everything(metrics: Metrics) -> None:
    metrics.set_build_info("1.2", "big", "lookahead", "grpc", 64, block=3, weights=WEIGHTS, placement="apart")
    metrics.prompt_started(20, 0.05)
    metrics.tokens_generated(9)
    metrics.tokens_followed(4, 0.2)
    metrics.request_answered(ANSWER, 1.5)
    metrics.request_failed("CANCELLED")
    metrics.request_rejected("RESOURCE_EXHAUSTED", "queue_full")
    metrics.request_cancelled("client")
    stats = EngineStats(queued=3, running=2, slots_free=48)
    stats.pages_used, stats.pages_total = {"draft": 30, "target": 20}, {"draft": 100, "target": 80}
    stats.pages_cached, stats.pages_leaked = {"draft": 16, "target": 0}, {"draft": 0, "target": 2}
    stats.prefix_queries, stats.prefix_hits = {"draft": 50, "target": 40}, {"draft": 32, "target": 16}
    stats.preemptions, stats.shrinks = 3, 4
    stats.resamples, stats.collapses, stats.ess_shares, stats.committed_lags = 5, 1, [0.3, 1.0], [0, 7]
    for accepted, hit in ((2, False), (3, True), (0, False)):
        stats.exact["walk"].count(accepted, block=3, rows=4, ahead=True, hit=hit)
    stats.exact["rejection"].count(1, block=3, rows=2, ahead=False, hit=False)
    stats.exact_alone_rounds = 6
    metrics.groups[0].set_health(draft=False, target=True)
    metrics.groups[0].observe_step(stats)
    metrics.groups[0].observe_round(RoundTimes(0.02, 0.012, 0.015, 0.001, 0.002, 0.004, 0.001))
    metrics.set_serving(False)
    metrics.groups[0].set_incarnation(2)
    metrics.groups[0].workers_restarted()
    metrics.groups[0].draft_restarted()


def test_what_is_reported_is_what_is_shown(metrics):
    """Every metric shows the value that `report_everything` reported."""
    report_everything(metrics)
    for name, expected in {
        "smc_prompt_tokens_total": 20,
        "smc_generation_tokens_total": 9,
        "smc_time_to_first_token_seconds_count": 1,
        "smc_inter_token_latency_seconds_count": 4,
        "smc_inter_token_latency_seconds_sum": 0.2,
        "smc_e2e_request_latency_seconds_sum": 1.5,
        "smc_requests_queued": 3,
        "smc_requests_running": 2,
        "smc_slots_free": 48,
        "smc_slots_capacity": 64,
        "smc_resamples_total": 5,
        "smc_collapses_total": 1,
        "smc_preemptions_total": 3,
        "smc_population_shrinks_total": 4,
        "smc_ess_share_ratio_count": 2,
        "smc_committed_lag_tokens_sum": 7,
        "smc_round_seconds_sum": 0.02,
        "smc_request_prompt_tokens_sum": 20,
        "smc_request_generation_tokens_sum": 7,
        "smc_worker_restarts_total": 1,
        "smc_draft_restarts_total": 1,
        "smc_epoch": 2,
        "smc_serving": 0,
    }.items():
        assert value(metrics, name) == pytest.approx(expected), name
    assert value(metrics, "smc_requests_total", status="OK", finish_reason="eos") == 1
    assert value(metrics, "smc_requests_rejected_total", code="RESOURCE_EXHAUSTED", cause="queue_full") == 1
    assert value(metrics, "smc_requests_cancelled_total", by="client") == 1
    assert [value(metrics, "smc_kv_cache_usage_ratio", group=group) for group in ("draft", "target")] == pytest.approx(
        [0.14, 0.25]
    )
    assert 0 <= value(metrics, "smc_last_round_age_seconds") < 60
    assert [value(metrics, "smc_model_tokens_total", group=group) for group in ("draft", "target")] == [160, 40]
    pages = {
        what: value(metrics, f"smc_kv_pages_{what}", group="target") for what in ("used", "free", "capacity", "leaked")
    }
    assert pages == {"used": 20, "free": 60, "capacity": 80, "leaked": 2}
    prefix = [
        value(metrics, f"smc_prefix_cache_{what}_total", group=group)
        for group in ("draft", "target")
        for what in ("queries", "hits")
    ]
    assert prefix == [50, 32, 40, 16] and value(metrics, "smc_kv_pages_cached", group="draft") == 16
    counts = ("drafts", "draft_tokens", "accepted_tokens", "hits", "misses", "rows")
    for verification, wanted in (("walk", [3, 9, 5, 1, 2, 12]), ("rejection", [1, 3, 1, 0, 0, 2])):
        found = [value(metrics, f"smc_spec_decode_num_{what}_total", verification=verification) for what in counts]
        assert found == wanted
    assert value(metrics, "smc_spec_decode_num_alone_rounds_total") == 6
    by_position = "smc_spec_decode_num_accepted_tokens_per_pos_total"
    assert [value(metrics, by_position, position=str(position), verification="walk") for position in range(3)] == [
        2,
        2,
        1,
    ]
    parts = [
        value(metrics, "smc_round_part_seconds_sum", part=part) for part in ("draft", "target", "link", "coordinator")
    ]
    assert parts == [0.012, 0.015, 0.001, 0.002]
    assert [value(metrics, "smc_stall_seconds_total", group=group) for group in ("draft", "target")] == [0.004, 0.001]
    assert [value(metrics, "smc_group_healthy", group=group) for group in ("draft", "target")] == [0, 1]
    service = {"version": "1.2", "form": "lookahead", "link": "grpc", "placement": "apart"}
    assert value(metrics, "smc_build_info", **service, weights="ab", draft_weights="cd") == 1


def test_a_leak_stays_seen_while_requests_run(metrics):
    """A leak stays reported while requests run, because only an idle engine can detect it: the alert must not end with
    the next request."""
    pages = {"pages_used": {"draft": 30}, "pages_total": {"draft": 100}}
    for leaked in ({"draft": 2}, {}):
        metrics.groups[0].observe_step(EngineStats(**pages, pages_leaked=leaked))
        assert value(metrics, "smc_kv_pages_leaked", group="draft") == 2
    metrics.groups[0].observe_step(EngineStats(**pages, pages_leaked={"draft": 0}))
    assert value(metrics, "smc_kv_pages_leaked", group="draft") == 0


def test_a_worker_group_that_does_not_serve_has_no_slots(metrics):
    """While it loads its models, is lost or drains; also if steps of its engine still come. Otherwise its slots would
    count as free, or as in use."""

    def slots() -> list[float]:
        return [value(metrics, "smc_slots_free"), value(metrics, "smc_slots_capacity")]

    metrics.set_build_info("1.2", "big", "lookahead", "grpc", 64, block=3, weights=WEIGHTS, placement="apart")
    group = metrics.groups[0]
    assert slots() == [0, 0]
    group.set_health(draft=True, target=True)
    assert slots() == [64, 64]
    group.observe_step(EngineStats(slots_free=48))
    group.set_health(draft=False, target=True)
    assert slots() == [48, 64]
    group.set_health(draft=False, target=False)
    assert slots() == [0, 0]
    group.observe_step(EngineStats(slots_free=48))
    assert slots() == [0, 0]


def test_a_lost_worker_group_holds_nothing(metrics, monkeypatch):
    """When a worker group is lost, its gauges fall to zero. Otherwise its last values would stand until the next
    group's first step and look like a queue that does not move."""
    told, group = {}, SimpleNamespace(start=lambda: None, address="", secret="", draft_degree=1)

    def connect(address, secret, on_step, on_lost) -> SimpleNamespace:
        told.update(step=on_step, lost=on_lost)
        return SimpleNamespace(attached=lambda timeout: asyncio.sleep(0))

    monkeypatch.setattr(launch, "WorkerGroup", lambda config, pair, incarnation, name: group)
    monkeypatch.setattr(launch, "CoordinatorClient", connect)
    pair = SimpleNamespace(engine=SimpleNamespace(max_slots=64))
    supervisor = launch.Supervisor(
        WorkerGroupConfig(), pair, on_step=lambda step: metrics.groups[0].observe_step(step.stats)
    )
    asyncio.run(supervisor._start_group())
    held = EngineStats(
        queued=3, running=2, slots_free=48, pages_used={"draft": 30}, pages_total={"draft": 100}, resamples=5
    )
    held.pages_cached, held.pages_leaked = {"draft": 16}, {"draft": 2}
    told["step"](EngineStep(stats=held))
    told["lost"]()
    nothing = {"draft": 0}
    assert supervisor.stats == EngineStats(
        slots_free=0, pages_used=nothing, pages_total={"draft": 100}, pages_leaked=nothing
    )
    assert [value(metrics, f"smc_{name}") for name in ("requests_queued", "requests_running", "slots_free")] == [
        0,
        0,
        0,
    ]
    pages = [
        value(metrics, f"smc_kv_pages_{what}", group="draft")
        for what in ("used", "cached", "leaked", "free", "capacity")
    ]
    assert pages == [0, 0, 0, 100, 100]
    assert value(metrics, "smc_resamples_total") == 5, "what has happened stays"


def test_two_services_do_not_share_numbers(metrics):
    metrics.tokens_generated(3)
    assert value(Metrics(), "smc_generation_tokens_total") == 0


def test_metrics_after_requests(pair):
    """After three answers and a refusal, the metrics equal the sums over the answers' own usage, times and
    statistics."""
    with serving(pair, metrics_port=0) as service, service.client() as client:
        question = [Message("user", "Mia has 12 apples. She buys 30 more. How many now?")]
        populations = ("independent", "distinct", "independent")
        answers = [
            client.generate(question, method="smc", particles=4, population=p, seed=i, max_tokens=16)
            for i, p in enumerate(populations)
        ]
        with pytest.raises(ServiceError):
            client.generate("x", particles=0)
        service.wait_until_free()
        with urllib.request.urlopen(f"http://127.0.0.1:{service.gateway.metrics_port}/metrics") as page:
            text = page.read().decode()
        shown = parse(text)
    assert 'smc_slots_free{model_name="demo-target",worker_group="0"} 64' in text and "process_open_fds " in text
    tokens = sum(len(answer.tokens) for answer in answers)
    assert shown["smc_generation_tokens_total"] == tokens
    assert shown["smc_prompt_tokens_total"] == sum(answer.usage.prompt_tokens for answer in answers)
    assert shown["smc_time_to_first_token_seconds_count"] == shown["smc_e2e_request_latency_seconds_count"] == 3
    assert 0 < shown["smc_inter_token_latency_seconds_count"] < tokens
    assert shown["smc_e2e_request_latency_seconds_sum"] == pytest.approx(
        sum(answer.seconds for answer in answers), rel=0.5
    )
    for part in ("queue", "prefill", "decode"):
        assert shown[f"smc_request_{part}_time_seconds_sum"] == pytest.approx(
            sum(getattr(answer.times, part) for answer in answers)
        )
    assert all(answer.times.prefill > 0 and answer.times.decode > 0 for answer in answers)
    assert all(sum(vars(answer.times).values()) <= answer.seconds + 0.5 for answer in answers), (
        "its clock starts a moment later"
    )
    assert shown["smc_request_cached_tokens_sum"] == sum(answer.usage.cached_tokens for answer in answers)
    assert sum(v for k, v in shown.items() if k.startswith("smc_requests_total{")) == 4
    assert shown['smc_kv_pages_leaked{group="draft"}'] == shown["smc_requests_running"] == 0
    for group in ("draft", "target"):
        pages = {
            what: shown[f'smc_kv_pages_{what}{{group="{group}"}}'] for what in ("used", "cached", "free", "capacity")
        }
        assert 0 < pages["cached"] <= pages["used"] == pages["capacity"] - pages["free"]
        queries, hits = (shown[f'smc_prefix_cache_{what}_total{{group="{group}"}}'] for what in ("queries", "hits"))
        assert queries == sum(answer.usage.prompt_tokens for answer in answers)
        assert hits >= sum(answer.usage.cached_tokens for answer in answers) > 0
    assert shown["smc_slots_free"] == shown["smc_slots_capacity"] == 64
    for group, name in (("draft", "draft_tokens"), ("target", "target_tokens")):
        assert shown[f'smc_model_tokens_total{{group="{group}"}}'] == sum(getattr(a.statistics, name) for a in answers)
    rounds = [answer.statistics.rounds for answer in answers]
    assert shown["smc_committed_lag_tokens_count"] == sum(rounds)
    assert shown["smc_ess_share_ratio_count"] == rounds[0] + rounds[2], "of distinct particles it says little"
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{service.gateway.metrics_port}/metrics", timeout=1)


def test_texts_are_logged_where_that_is_asked_for(pair, caplog, tmp_path):
    """With `log_texts` the log has prompts and answers. `logged_prompts` reads the prompts back for training a draft,
    each distinct prompt once."""
    caplog.set_level(logging.INFO, "smcserve.requests")
    questions = ['Mia has 12 apples.\n"How many" now?', "2 + 3 = ?"]
    with serving(pair, log_texts=True) as service, service.client() as client:
        for question in (*questions, questions[0]):
            answer = client.generate([Message("user", question)], method="exact", seed=1, max_tokens=8)
        until(lambda: len(caplog.records) == 3)
    assert json.loads(caplog.messages[-1])["answer"] == answer.text
    log = tmp_path / "service.log"
    log.write_text("Starting {\n" + "".join(f"2026-01-01 12:00:00 INFO {line}\n" for line in caplog.messages))
    prompts = [tuple(pair.tokenizer.chat([{"role": "user", "content": question}])) for question in questions]
    assert list(logged_prompts(pair.tokenizer, log)) == prompts
    # The same with lines wrapped as container runtimes do, and with other braces before them.
    wrapped = [json.dumps({"log": f"{{x}} INFO {line}\n", "stream": "stderr"}) for line in caplog.messages]
    log.write_text("\n".join(wrapped))
    assert list(logged_prompts(pair.tokenizer, log)) == prompts
    log.write_text('{"prompt_ids": [1, 99999]}\n')
    with pytest.raises(
        ValueError, match=r"holds token 99999, but the target has .*; give the log of a service of this target"
    ):
        logged_prompts(pair.tokenizer, log)
    log.write_text('{"request_id": "a", "prompt_tokens": 3}\n')
    with pytest.raises(ValueError, match=r"holds no request with its prompt; allowed: .* log-texts: true"):
        logged_prompts(pair.tokenizer, log)


def test_the_log_has_one_line_a_request(service, caplog):
    """The log has one line for each request, with the fields that operators need and no text of prompts or answers."""
    caplog.set_level(logging.INFO, "smcserve.requests")
    prompt = [Message("user", "Mia has 12 apples. She buys 30 more. How many now?")]
    with service.client() as client:
        answer = client.generate(prompt, request_id="mine", method="smc", particles=4, seed=1, max_tokens=30)
        with pytest.raises(ServiceError):
            client.generate(prompt, request_id="wrong", particles=0)
        with pytest.raises(ServiceError):
            client.generate(prompt, request_id="late", timeout=0.3, **LONG)
    until(lambda: len(caplog.records) == 3)
    lines = {line["request_id"]: line for line in map(json.loads, caplog.messages)}
    good, wrong, late = (lines[name] for name in ("mine", "wrong", "late"))
    assert (good["status"], good["finish_reason"], good["method"], good["rows"]) == (
        "OK",
        answer.finish_reason,
        "smc",
        4,
    )
    assert (good["prompt_tokens"], good["tokens"]) == (answer.usage.prompt_tokens, len(answer.tokens))
    assert 0 < good["first_token_seconds"] <= good["seconds"]
    assert (wrong["status"], wrong["cause"], wrong["tokens"]) == ("INVALID_ARGUMENT", "invalid", 0)
    assert (late["status"], late["cause"]) == ("DEADLINE_EXCEEDED", "deadline")
    assert "apples" not in caplog.text


def test_a_metrics_port_in_use_is_said_so(metrics):
    port, stop = metrics.serve(0)
    try:
        with pytest.raises(OSError, match=f"cannot serve metrics on 127.0.0.1:{port}"):
            Metrics().serve(port)
    finally:
        stop()


def test_distinct_particles_have_no_share_of_effective_ones():
    """Distinct particles do not count in the metric of effective sample size: their weights are as unequal as the token
    distribution, and would look like a degenerate population."""
    metrics, stats = Metrics(), EngineStats()
    stats.count_round(None, lag=3, resampled=False, collapsed=False)
    stats.count_round(0.5, lag=4, resampled=True, collapsed=False)
    metrics.groups[0].observe_step(stats)
    assert value(metrics, "smc_ess_share_ratio_count") == 1 and value(metrics, "smc_committed_lag_tokens_count") == 2


def test_calls_of_potentials_are_counted(metrics):
    """Times of potential calls and requests that a potential has ended are counted, from the engine through the
    coordinator's stream to the metrics."""
    end = threading.Event()

    def fails(prefixes: Prefixes) -> list[float]:
        raise KeyError("x")

    def hangs(prefixes: Prefixes) -> list[float]:
        end.wait(60)
        return [0.0] * len(prefixes.texts)

    config = replace(CASES[0], potential_timeout=0.5)
    potentials = {"same": lambda prefixes: [0.0] * len(prefixes.texts), "fails": fails, "hangs": hangs}
    engine = local_engine(tiny_pair(), config, potentials=potentials)
    asked = [request(request_id=f"{name} {i}", potential=name, max_tokens=9, seed=i, ignore_eos=True)
             for name in potentials for i in range(2)]  # fmt: skip
    found = answers(engine, asked)
    end.set()
    calls = 2 + 2 * (1 + found["same 0"].statistics.rounds)
    stats = STEPS.decode(STEPS.encode(EngineStep(stats=engine.take_stats()))).stats
    metrics.groups[0].observe_step(stats)
    assert value(metrics, "smc_potential_errors_total") == value(metrics, "smc_potential_timeouts_total") == 2
    assert value(metrics, "smc_potential_call_seconds_count") == calls == len(stats.potentials.seconds)
    assert 0 < value(metrics, "smc_potential_call_seconds_sum") < 60
    assert not engine.take_stats().potentials.seconds
