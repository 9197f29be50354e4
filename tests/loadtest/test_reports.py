"""The files that a run writes: JSON with vLLM's names, and a picture."""

from __future__ import annotations

import asyncio
import json

import pytest

from loadtest import report
from loadtest.monitor import ProcessUsage, ServerSample
from loadtest.runner import CapacityProbe, search
from smc.api.request import Statistics
from smc.terminal import finite
from tests.loadtest.made import QUIET, made_run, record

METRICS = {
    **{f'smc_kv_pages_used{{group="{group}"}}': 40.0 for group in ("draft", "target")},
    **{f'smc_kv_pages_cached{{group="{group}"}}': 10.0 for group in ("draft", "target")},
    'smc_requests_rejected_total{cause="queue_full"}': 7.0,
    "process_resident_memory_bytes": 3e8,
}
SAMPLES = [
    ServerSample(float(at), at % 3, 1, METRICS, {"gateway": ProcessUsage(300 << 20), "rank 1": ProcessUsage(500 << 20)})
    for at in range(10)
]
RECORDS = [
    record(0.0, (0.5,), (1,), counted=False),
    record(2.0, (2.2, 2.5), (3, 4), index=2, prompt_tokens=9, statistics=Statistics(8, rounds=3, mean_ess=6.0)),
    record(1.0, (1.1, 1.9), (2, 1), index=1, prompt_tokens=7),
    record(3.0, code="RESOURCE_EXHAUSTED", index=3),
    record(4.0, (4.1,), (2,), 5.0, code="CANCELLED", cancelled=True, index=4),
]
VLLM = {
    *(
        "date",
        "backend",
        "model_id",
        "num_prompts",
        "request_rate",
        "burstiness",
        "max_concurrency",
        "duration",
        "completed",
        "failed",
    ),
    *("total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput", "output_throughput"),
    *("total_token_throughput", "max_concurrent_requests", "input_lens", "output_lens", "ttfts", "itls", "errors"),
    *(
        f"{figure}_{name}_ms"
        for name in ("ttft", "tpot", "itl", "e2el")
        for figure in ("mean", "median", "std", "p50", "p90", "p95", "p99")
    ),
}


@pytest.fixture
def run():
    return made_run(RECORDS, SAMPLES, goodput="ttft:150 e2el:5000")


def test_json_has_the_names_of_vllm_and_one_of_ours(run):
    written = json.loads(json.dumps(finite(report.run_numbers(run)), allow_nan=False))
    assert set(written) == VLLM | {"smcserve"}
    assert (written["num_prompts"], written["completed"], written["failed"], written["request_rate"]) == (4, 2, 1, 2.0)
    assert (written["burstiness"], written["total_input_tokens"], written["total_output_tokens"]) == (1.0, 16, 10)
    assert written["p99_ttft_ms"] == pytest.approx(199) and written["mean_e2el_ms"] == pytest.approx(700)
    assert written["request_goodput"] == pytest.approx(1 / 4)


def test_arrays_are_in_the_order_of_sending(run):
    written = report.run_numbers(run)
    assert written["input_lens"] == [7, 9, 0, 0] and written["output_lens"] == [3, 7, 0, 2]
    assert written["ttfts"] == pytest.approx([0.1, 0.2, 0.0, 0.1])
    assert written["itls"] == [[pytest.approx(0.8)], [pytest.approx(0.3)], [], []]
    assert written["errors"] == ["", "", "RESOURCE_EXHAUSTED: ", ""]
    ours = written["smcserve"]
    assert [request["index"] for request in ours["requests"]] == [1, 2, 3, 4]
    assert ours["codes"] == {"OK": 2, "RESOURCE_EXHAUSTED": 1, "CANCELLED": 1} and ours["cancelled"] == 1
    assert ours["settings"]["goodput"] == "ttft:150 e2el:5000" and ours["site"]["server"]["form"] == "lookahead"
    assert len(ours["samples"]) == 10 and ours["samples"][3]["queued"] == 1 and ours["after"]["running"] == 0
    assert [check["name"] for check in ours["checks"] if check["passed"] is False] == ["objective"]


def test_the_picture_of_a_run(run, tmp_path):
    from loadtest import picture

    picture.draw(tmp_path / "run.png", run)
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert len(picture.panels_of(run)) == 8


def test_the_picture_of_a_run_that_was_not_watched(tmp_path):
    """Without metrics, memory and answers, the remaining panels are drawn."""
    from loadtest import picture

    unwatched = [
        made_run(records, after=ServerSample(9.0, error="gone")) for records in ([record(1.0, code="UNAVAILABLE")], [])
    ]
    assert [len(picture.panels_of(run)) for run in unwatched] == [5, 5]
    picture.draw(tmp_path / "run.png", unwatched[1])
    assert (tmp_path / "run.png").stat().st_size > 5000


def test_what_a_reader_must_know_comes_with_the_figures():
    late = [record(at, (at + 0.1,), (1,), late=0.2) for at in range(9)]
    text = "\n".join(report.warnings(made_run(late, [*SAMPLES, ServerSample(11.0, error="UNAVAILABLE: gone")])))
    assert "the generator was late: requests were sent up to 200 ms" in text
    assert "1 of 11 samples of the server failed" in text


def test_the_picture_and_the_numbers_of_a_search(run, tmp_path):
    from loadtest import picture

    async def probe(rate: float) -> CapacityProbe:
        return CapacityProbe(
            rate, rate <= 5, 0.97, rate, 100.0, 900.0, 40, {"OK": 39, "UNAVAILABLE": 1}, late=rate == 8
        )

    found = asyncio.run(search(probe, 2.0, 0.1))
    assert report.capacity_sentence(found, "ttft:150").startswith("Capacity: 4.7")
    assert "the generator was late at 8 requests/s" in report.capacity_warnings(found)[0]
    written = json.loads(json.dumps(report.capacity_numbers(found, run)))
    ours = written["smcserve"]["capacity"]
    assert ours["low"] == found.low and len(ours["probes"]) == len(found.probes) and written["num_prompts"] == 4
    # tests/loadtest/test_against_a_gateway.py draws it with the best run's panels.
    picture.draw(tmp_path / "search.png", None, found)
    assert (tmp_path / "search.png").stat().st_size > 5000


def test_the_picture_shows_what_the_server_counted(run):
    from loadtest import picture

    assert "Refused and cancelled, as the server counted them" in picture.panels_of(run)
    assert "Refused and cancelled, as the server counted them" not in picture.panels_of(made_run(RECORDS, after=QUIET))
