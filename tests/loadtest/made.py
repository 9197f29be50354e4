"""Records, samples and runs made by hand."""

from __future__ import annotations

from typing import Any

from loadtest.endpoint import Endpoint
from loadtest.judge import judge
from loadtest.measures import summarise
from loadtest.monitor import Sample
from loadtest.record import Planned, Record
from loadtest.runner import Outcome
from loadtest.runs import Run, Site
from loadtest.settings import Settings
from services.client import ModelDescription, ModelInfo, ServerInfo

SERVER = ServerInfo("1.2.3", "lookahead", 8, 4, 64, "nccl", 1, True, 0, 0, 12.5, 256, 1024, 4 << 20)
MODEL = ModelInfo(
    ModelDescription("big", "llama", 1000, 1), ModelDescription("small", "llama", 10, 1), 512, 512, (1,), True
)
SITE = Site(Endpoint("127.0.0.1:1"), SERVER, MODEL)
QUIET = Sample(
    100.0,
    0,
    0,
    {'smc_kv_pages_used{group="draft"}': 32.0, 'smc_kv_pages_leaked{group="draft"}': 0.0},
    epoch=SERVER.epoch,
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
    **more: Any,
) -> Record:
    cancel_after = 1.0 if cancelled else None
    planned = Planned(
        index, sent - late, counted, "?", {"method": "smc", "seed": index, "max_tokens": 9}, cancel_after, pause=pause
    )
    end = end if end is not None else times[-1] if times else sent
    reason = "eos" if code == "OK" else ""
    return Record(planned, sent, list(times), list(tokens), end, code, "", cancelled, reason, **more)


def made_run(records: list[Record], samples: list[Sample] = (), after: Sample = QUIET, **settings: Any) -> Run:
    given = Settings.of({"rate": 2.0, "duration": 10.0}, settings)
    summary = summarise(records, given.goodput)
    outcome = Outcome(records, 10.0, 0.5)
    return Run(
        SITE, given, 1.8e9, outcome, list(samples), after, summary, judge(summary, given, SERVER.epoch, samples, after)
    )
