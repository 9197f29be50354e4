"""Hand-made records, samples and runs."""

from __future__ import annotations

from typing import Any

from loadtest.checks import check_run
from loadtest.client import PlannedRequest, RequestRecord, ServiceEndpoint
from loadtest.monitor import ServerSample
from loadtest.runner import LoadedService, LoadRun, RunResult
from loadtest.settings import LoadSettings
from loadtest.summary import summarise
from services.client import ModelDescription, ModelInfo, ServerInfo

SERVER = ServerInfo(
    "1.2.3", "lookahead", 8, 4, 64, "nccl", 1, True, 0, 0, 12.5, 256, 1024, 4 << 20, 8192, "apart", 99, 99
)
MODEL = ModelInfo(
    ModelDescription("big", "llama", 1000, 1), ModelDescription("small", "llama", 10, 1), 512, 512, (1,), True
)
SITE = LoadedService(ServiceEndpoint("127.0.0.1:1"), SERVER, MODEL)
QUIET = ServerSample(
    100.0,
    0,
    0,
    {'smc_kv_pages_used{group="draft"}': 32.0, 'smc_kv_pages_leaked{group="draft"}': 0.0},
    incarnation=SERVER.incarnation,
)


def record(
    sent: float = 0.0,
    times: tuple[float, ...] = (),
    tokens: tuple[int, ...] = (),
    end: float | None = None,
    code: str = "OK",
    *,
    index: int = 0,
    late: float = 0.0,
    counted: bool = True,
    cancelled: bool = False,
    pause: float = 0.0,
    method: str = "smc",
    **more: Any,
) -> RequestRecord:
    cancel_after = 1.0 if cancelled else None
    planned = PlannedRequest(
        index, sent - late, counted, "?", {"method": method, "seed": index, "max_tokens": 9}, cancel_after, pause=pause
    )
    end = end if end is not None else times[-1] if times else sent
    reason = "eos" if code == "OK" else ""
    return RequestRecord(planned, sent, list(times), list(tokens), end, code, "", cancelled, reason, **more)


def made_run(
    records: list[RequestRecord], samples: list[ServerSample] = (), after: ServerSample = QUIET, **settings: Any
) -> LoadRun:
    given = LoadSettings.of({"rate": 2.0, "duration": 10.0}, settings)
    summary = summarise(records, given.goodput)
    outcome = RunResult(records, 10.0, 0.5)
    return LoadRun(
        SITE,
        given,
        1.8e9,
        outcome,
        list(samples),
        after,
        summary,
        check_run(summary, given, SERVER.incarnation, samples, after),
    )
