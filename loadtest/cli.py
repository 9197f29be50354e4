"""`python -m loadtest`: its options, and what becomes of a run on the way out.

Exit codes: 0 all is well, 1 the objective was missed or something failed, 2 a mistake in what was asked, 3 there is no
service, 130 interrupted."""

from __future__ import annotations

import asyncio
import json as json_module
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from loadtest import files, profiles, runs, show
from loadtest.arrivals import KINDS
from loadtest.endpoint import Endpoint, Unreachable
from loadtest.laws import FORMS
from loadtest.runs import Site
from loadtest.served import serve as serve_child
from loadtest.settings import Settings
from services.connection_options import DEFAULT_ADDRESS, SERVICE, Tls, TlsCa, TlsCert, TlsKey, TokenFile
from services.security import read_tokens
from smc.terminal import err, finite, option, print_error

WHEN, WHAT, JUDGED, OUTPUT = "When requests come", "What they ask", "What is good", "Output"
SETTINGS = tuple(field.name for field in fields(Settings))
LIMIT = re.compile(r"\w+:")
PRECISION = 0.1
MAX_WAIT = 86400
SEARCH_PROFILE = "capacity"
"""Of a search, if no other is given."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


def _number(panel: str, text: str, *names: str) -> Any:
    return option(panel, text, *names, metavar="NUMBER")


Words = str | None
Number = float | None
Count = int | None


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
def load(
    ctx: typer.Context,
    serve_arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- ARGUMENTS]", help="After --: further ones of smcserve serve, with --serve.", show_default=False
        ),
    ] = None,
    profile: Annotated[Words, option(WHEN, f"{', '.join(profiles.shipped())}, or a TOML file.", metavar="NAME")] = None,
    arrivals: Annotated[Words, option(WHEN, f"{', '.join(KINDS)}. Default: poisson.", metavar="KIND")] = None,
    rate: Annotated[Number, _number(WHEN, "Requests a second.", "--rate", "-r")] = None,
    rate_end: Annotated[Number, _number(WHEN, "Of a ramp, at its end.")] = None,
    burstiness: Annotated[Number, _number(WHEN, "Of gamma arrivals; 1 = poisson, less = burstier.")] = None,
    trace: Annotated[Path | None, option(WHEN, "Arrivals from a file, JSONL or CSV.", metavar="FILE")] = None,
    duration: Annotated[
        Number, option(WHEN, "For how long requests are sent.", "--duration", "-d", metavar="SECONDS")
    ] = None,
    requests: Annotated[Count, option(WHEN, "How many are sent at most.", metavar="COUNT")] = None,
    warm_up: Annotated[Number, option(WHEN, "Before that; these requests are not counted.", metavar="SECONDS")] = None,
    overload: Annotated[Number, _number(WHEN, "The rate as a multiple of --capacity.")] = None,
    prompts: Annotated[Path | None, option(WHAT, "JSONL file. Default: the demo problems.", metavar="FILE")] = None,
    prompt_length: Annotated[Words, option(WHAT, f"Random prompts of this length: {FORMS}.", metavar="LAW")] = None,
    output_length: Annotated[Words, option(WHAT, f"Longest answer: {FORMS}. Default: 128.", metavar="LAW")] = None,
    ignore_eos: Annotated[
        bool | None, option(WHAT, "Go on to the longest answer.", "--ignore-eos/--no-ignore-eos")
    ] = None,
    method: Annotated[
        Words, option(WHAT, "smc, exact, target, draft, or a mix: smc:0.9,target:0.1. Default: smc.", metavar="MIX")
    ] = None,
    particles: Annotated[
        Words, option(WHAT, "N, or a mix: 4:0.5,8:0.5. Default: the server's.", "--particles", "-n", metavar="MIX")
    ] = None,
    seed: Annotated[
        Count, option(WHAT, "Same seed, same requests at the same times. Default: 0.", metavar="SEED")
    ] = None,
    cancel_share: Annotated[Number, option(WHAT, "Share of requests that are cancelled.", metavar="SHARE")] = None,
    cancel_after: Annotated[Number, option(WHAT, "After this long.", metavar="SECONDS")] = None,
    cancel_after_tokens: Annotated[Count, option(WHAT, "After this many tokens.", metavar="COUNT")] = None,
    cancel_by: Annotated[Words, option(WHAT, "leave, abort, or a mix. Default: leave.", metavar="MIX")] = None,
    slow_share: Annotated[Number, option(WHAT, "Share of requests whose client reads slowly.", metavar="SHARE")] = None,
    slow_pause: Annotated[Number, option(WHAT, "Its pause between two messages.", metavar="SECONDS")] = None,
    deadline: Annotated[Number, option(WHAT, "Of every request. Default: 60.", metavar="SECONDS")] = None,
    goodput: Annotated[
        Words,
        option(
            JUDGED, "Objective in milliseconds: ttft:500 tpot:50 e2el:5000, or some of these.", metavar="NAME:MS .."
        ),
    ] = None,
    attainment: Annotated[
        Number, option(JUDGED, "Share of requests that must meet it. Default: 0.95.", metavar="SHARE")
    ] = None,
    capacity: Annotated[Number, _number(JUDGED, "Judge overload against this many requests a second.")] = None,
    flat: Annotated[
        bool | None,
        option(JUDGED, "Check that memory, threads and open files of every process do not grow.", "--flat/--no-flat"),
    ] = None,
    find_capacity: Annotated[
        bool, option(JUDGED, "Search the highest rate that meets the objective, from --rate.", "--find-capacity")
    ] = False,
    precision: Annotated[Number, option(JUDGED, f"Of that search. Default: {PRECISION:g}.", metavar="SHARE")] = None,
    settle: Annotated[
        Number, option(JUDGED, "Rest before the service is checked for leftovers. Default: 5.", metavar="SECONDS")
    ] = None,
    address: Annotated[
        Words, option(SERVICE, f"Default: {DEFAULT_ADDRESS}.", "--address", "-a", metavar="HOST:PORT")
    ] = None,
    wait: Annotated[
        Number, option(SERVICE, "At most, for a service that is starting. Default: 0.", metavar="SECONDS")
    ] = None,
    serve: Annotated[bool, option(SERVICE, "Start smcserve serve, and stop it afterwards.", "--serve")] = False,
    metrics: Annotated[Words, option(SERVICE, "The service's /metrics, read beside.", metavar="URL")] = None,
    watch_pid: Annotated[
        Count, option(SERVICE, "Of smcserve serve on this machine: watch what its processes hold.", metavar="PID")
    ] = None,
    interval: Annotated[
        Number, option(SERVICE, "Between two looks at the server. Default: 1.", metavar="SECONDS")
    ] = None,
    connections: Annotated[
        Count, option(SERVICE, "To share the requests between. Default: 1.", metavar="COUNT")
    ] = None,
    token_file: TokenFile = None,
    tls: Tls = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    json: Annotated[Path | None, option(OUTPUT, "Write all numbers, under vLLM's names.", metavar="FILE")] = None,
    html: Annotated[Path | None, option(OUTPUT, "Write a report with pictures.", metavar="FILE")] = None,
) -> int:
    """Load a running service over gRPC, open loop, and say how it bore that."""
    given = {name: value for name, value in ctx.params.items() if value is not None}
    profile = profile or (SEARCH_PROFILE if find_capacity else None)
    settings = Settings.of(
        profiles.load(profile) if profile else {}, {name: given[name] for name in SETTINGS if name in given}
    )
    _check(ctx.params, settings)
    job = Job(settings, PRECISION if precision is None else precision, find_capacity, json, html)
    token = read_tokens(token_file, "--token-file")[0] if token_file else None
    with ExitStack() as stack:
        if serve:
            err.print("starting smcserve serve")
            served = stack.enter_context(serve_child(serve_arguments or ()))
            address, metrics, watch_pid = served.address, served.metrics, served.pid
        endpoint = Endpoint(address or DEFAULT_ADDRESS, token, tls, tls_ca, tls_cert, tls_key)
        if wait:
            endpoint.wait(wait)
        return job.run(Site.find(endpoint, metrics, watch_pid))


@dataclass(frozen=True)
class Job:
    """What is to be done with a service, and where its results go."""

    settings: Settings
    precision: float
    find_capacity: bool
    json: Path | None
    html: Path | None

    def run(self, site: Site) -> int:
        return self._search(site) if self.find_capacity else self._run(site)

    def _run(self, site: Site) -> int:
        run = asyncio.run(runs.run_once(site, self.settings, show.watch))
        show.show_run(run)
        if self.json:
            from loadtest import numbers

            _write_json(self.json, numbers.of_run(run))
        if self.html:
            from loadtest import page

            self.html.write_text(page.of_run(run))
        return 0 if run.good else 1

    def _search(self, site: Site) -> int:
        settings, objective = self.settings, str(self.settings.goodput)
        found, run = asyncio.run(runs.find_capacity(site, settings, self.precision, show.watch, show.show_probe))
        show.show_capacity(found, objective)
        if self.json:
            from loadtest import numbers

            _write_json(self.json, numbers.of_capacity(found, run))
        if self.html:
            from loadtest import page

            self.html.write_text(page.of_capacity(found, run, objective, settings.attainment))
        return 0 if found.good else 1


def _check(given: dict[str, Any], settings: Settings) -> None:
    """What the settings alone cannot know. Raises ValueError."""
    if given["serve"]:
        for name in ("address", "metrics", "watch_pid", "wait"):
            if given[name] is not None:
                raise ValueError(f"--{name.replace('_', '-')} has no effect with --serve, which knows it; leave it out")
    elif given["serve_arguments"]:
        raise ValueError(f"{' '.join(given['serve_arguments'])!r} has no effect without --serve; leave it out")
    if given["wait"] is not None and not 0 <= given["wait"] <= MAX_WAIT:
        raise ValueError(f"--wait {given['wait']:g}; allowed: 0 to {MAX_WAIT}")
    if given["find_capacity"]:
        if settings.goodput is None:
            raise ValueError("--find-capacity needs --goodput: the objective that a rate meets or misses")
        if settings.arrivals not in ("poisson", "gamma", "constant"):
            raise ValueError(
                f"--find-capacity needs arrivals of one rate, not --arrivals {settings.arrivals}; allowed: poisson, gamma, constant"
            )
        if settings.capacity is not None:
            raise ValueError("--find-capacity is for finding out the --capacity; leave out that and --overload")
    elif given["precision"] is not None:
        raise ValueError("--precision has no effect without --find-capacity; leave it out")
    if given["precision"] is not None and not 0.01 <= given["precision"] <= 1:
        raise ValueError(f"--precision {given['precision']:g}; allowed: 0.01 to 1")
    # Before a service is started for them; the run reads them again.
    if settings.trace:
        files.read_trace(settings.trace)
    if settings.prompts:
        files.read_prompts(settings.prompts)
    for name in ("json", "html"):
        if given[name] is not None and not given[name].absolute().parent.is_dir():
            raise ValueError(f"--{name} {given[name]}: its directory does not exist; make it first")


def _write_json(path: Path, numbers: dict[str, Any]) -> None:
    path.write_text(json_module.dumps(finite(numbers)) + "\n")


def joined(arguments: Sequence[str]) -> list[str]:
    """`--goodput ttft:500 e2el:5000` as one option, the way vLLM takes it."""
    result: list[str] = []
    limits = False
    for argument in arguments:
        if limits and LIMIT.match(argument):
            result[-1] += f" {argument}" if result[-1] != "--goodput" else ""
            if result[-1] == "--goodput":
                result.append(argument)
            continue
        limits = argument == "--goodput"
        result.append(argument)
    return result


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    usage_error: Any = (
        typer.BadParameter.__base__
    )  # click's class of wrong options, under whichever name typer carries it
    try:
        return app(joined(arguments), prog_name="python -m loadtest", standalone_mode=False) or 0
    except usage_error as error:
        print_error(f"{error.format_message()} (see python -m loadtest --help)")
        return 2
    except Unreachable as error:
        print_error(str(error))
        return 3
    except (ValueError, OSError) as error:
        print_error(str(error))
        return 2
    except (KeyboardInterrupt, typer.Abort):
        return 130


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started is stopped either way
    sys.exit(run(sys.argv[1:]))
