"""The command `python -m loadtest`: its options, and how the results of a run are written.

Exit codes: 0 success, 1 the objective was missed or a check failed, 2 invalid options or files, 3 there is no service,
130 interrupted."""

from __future__ import annotations

import asyncio
import json as json_module
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from loadtest import report, runner
from loadtest.arrivals import KINDS
from loadtest.client import ServiceEndpoint, ServiceUnreachable
from loadtest.distributions import FORMS
from loadtest.monitor import serve as serve_child
from loadtest.runner import LoadedService
from loadtest.settings import LoadSettings, load_profile, shipped_profiles
from loadtest.workload import read_prompts, read_trace
from services.connection_options import DEFAULT_ADDRESS, SERVICE, Tls, TlsCa, TlsCert, TlsKey, TokenFile
from services.security import read_tokens
from smc.terminal import USAGE_ERROR, check_drawing, err, finite, option, print_error, with_mappings

WHEN, WHAT, JUDGED, OUTPUT = "Arrivals", "Requests", "Objective and checks", "Output"
LIMIT = re.compile(r"\w+:")
PRECISION = 0.1
MAX_WAIT = 86400
SEARCH_PROFILE = "capacity"
"""The profile of a search, if no other is given."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


def _number(panel: str, text: str, *names: str) -> Any:
    return option(panel, text, *names, metavar="NUMBER")


OPTIONS: dict[str, Any] = {
    "arrivals": Annotated[
        str | None, option(WHEN, f"Kind of arrivals: {', '.join(KINDS)}. Default: poisson.", metavar="KIND")
    ],
    "rate": Annotated[float | None, _number(WHEN, "Requests sent per second.", "--rate", "-r")],
    "rate_end": Annotated[float | None, _number(WHEN, "Requests per second at the end of a ramp.")],
    "burstiness": Annotated[
        float | None, _number(WHEN, "Shape of gamma arrivals: 1 = poisson, below 1 = burstier, above 1 = more even.")
    ],
    "trace": Annotated[
        Path | None,
        option(WHEN, "File of arrival times and requests, JSONL or CSV, with --arrivals trace.", metavar="FILE"),
    ],
    "duration": Annotated[
        float | None,
        option(WHEN, "Time in which requests are sent, after the warm-up.", "--duration", "-d", metavar="SECONDS"),
    ],
    "requests": Annotated[
        int | None, option(WHEN, "Maximum number of requests, without those of the warm-up.", metavar="COUNT")
    ],
    "warm_up": Annotated[
        float | None,
        option(
            WHEN, "Time before --duration in which requests are sent but not counted. Default: 0.", metavar="SECONDS"
        ),
    ],
    "overload": Annotated[
        float | None, _number(WHEN, "Ratio of --rate to --capacity; two of the three options determine the third.")
    ],
    "prompts": Annotated[
        Path | None, option(WHAT, "JSONL file of prompts. Default: the problems of the demo pair.", metavar="FILE")
    ],
    "prompt_length": Annotated[
        str | None, option(WHAT, f"Use random prompts of this many tokens: {FORMS}.", metavar="LENGTH")
    ],
    "output_length": Annotated[
        str | None, option(WHAT, f"Maximum tokens of an answer: {FORMS}. Default: 128.", metavar="LENGTH")
    ],
    "ignore_eos": Annotated[
        bool | None,
        option(
            WHAT,
            "Continue every answer to --output-length tokens, past the end-of-text token.",
            "--ignore-eos/--no-ignore-eos",
        ),
    ],
    "method": Annotated[
        str | None,
        option(
            WHAT, "Method: smc, exact, target, draft, or a mix such as smc:0.9,target:0.1. Default: smc.", metavar="MIX"
        ),
    ],
    "particles": Annotated[
        str | None,
        option(
            WHAT,
            "Number of particles, 1..64, or a mix such as 4:0.5,8:0.5. Default: that of the service.",
            "--particles",
            "-n",
            metavar="MIX",
        ),
    ],
    "seed": Annotated[
        int | None,
        option(
            WHAT,
            "Seed of the run: with the same seed, the same requests come at the same times. Default: 0.",
            metavar="SEED",
        ),
    ],
    "cancel_share": Annotated[
        float | None, option(WHAT, "Share of requests that the client cancels, 0..1. Default: 0.", metavar="SHARE")
    ],
    "cancel_after": Annotated[
        float | None, option(WHAT, "Time after which a request of --cancel-share is cancelled.", metavar="SECONDS")
    ],
    "cancel_after_tokens": Annotated[
        int | None,
        option(WHAT, "Number of answer tokens after which a request of --cancel-share is cancelled.", metavar="COUNT"),
    ],
    "cancel_by": Annotated[
        str | None,
        option(
            WHAT,
            "How requests of --cancel-share are cancelled: leave (the client closes the stream), abort (it calls "
            "Abort), or a mix. Default: leave.",
            metavar="MIX",
        ),
    ],
    "slow_share": Annotated[
        float | None, option(WHAT, "Share of requests whose client reads slowly, 0..1. Default: 0.", metavar="SHARE")
    ],
    "slow_pause": Annotated[
        float | None,
        option(WHAT, "Time that a client of --slow-share waits before it reads the next message.", metavar="SECONDS"),
    ],
    "deadline": Annotated[float | None, option(WHAT, "Deadline of every request. Default: 60.", metavar="SECONDS")],
    "goodput": Annotated[
        str | None,
        option(
            JUDGED,
            "Latency objective in milliseconds, such as ttft:500 tpot:50 e2el:5000, or only some of these.",
            metavar="NAME:MS ..",
        ),
    ],
    "attainment": Annotated[
        float | None,
        option(JUDGED, "Share of requests that must meet --goodput, 0..1. Default: 0.95.", metavar="SHARE"),
    ],
    "capacity": Annotated[
        float | None,
        _number(
            JUDGED,
            "Capacity of the service in requests per second, against which its behaviour under overload is checked.",
        ),
    ],
    "flat": Annotated[
        bool | None,
        option(JUDGED, "Check that memory, threads and open files of every process do not grow.", "--flat/--no-flat"),
    ],
    "settle": Annotated[
        float | None,
        option(
            JUDGED,
            "Pause after the last request, before the service is checked for leftovers. Default: 5.",
            metavar="SECONDS",
        ),
    ],
    "interval": Annotated[
        float | None, option(SERVICE, "Time between two samples of the service's state. Default: 1.", metavar="SECONDS")
    ],
    "connections": Annotated[
        int | None, option(SERVICE, "Number of connections that share the requests. Default: 1.", metavar="COUNT")
    ],
}
"""Command-line option of each field of `LoadSettings`; None if it is not given."""


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
@partial(with_mappings, settings=OPTIONS)
def load(
    serve_arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- ARGUMENTS]", help="With --serve, arguments of smcserve serve, after --.", show_default=False
        ),
    ] = None,
    profile: Annotated[
        str | None,
        option(
            WHEN,
            f"Profile of settings: {', '.join(shipped_profiles())}, or a TOML file. Default: none; "
            f"with --find-capacity {SEARCH_PROFILE}.",
            metavar="NAME",
        ),
    ] = None,
    *,
    settings: Mapping[str, Any],
    find_capacity: Annotated[
        bool, option(JUDGED, "Search for the highest rate that meets --goodput, starting at --rate.", "--find-capacity")
    ] = False,
    precision: Annotated[
        float | None,
        option(
            JUDGED,
            "With --find-capacity, maximum distance of the lowest rate that misses the objective from the highest that "
            f"meets it, as a share of the latter, 0.01..1. Default: {PRECISION:g}.",
            metavar="SHARE",
        ),
    ] = None,
    address: Annotated[
        str | None,
        option(SERVICE, f"Address of the service. Default: {DEFAULT_ADDRESS}.", "--address", "-a", metavar="HOST:PORT"),
    ] = None,
    wait: Annotated[
        float | None,
        option(SERVICE, "Maximum time to wait for a service that is starting. Default: 0.", metavar="SECONDS"),
    ] = None,
    serve: Annotated[
        bool, option(SERVICE, "Start smcserve serve for this run, and stop it afterwards.", "--serve")
    ] = False,
    metrics: Annotated[
        str | None, option(SERVICE, "URL of the service's /metrics, which are recorded during the run.", metavar="URL")
    ] = None,
    watch_pid: Annotated[
        int | None,
        option(
            SERVICE,
            "Process id of smcserve serve on this machine, whose memory, threads and open files are recorded.",
            metavar="PID",
        ),
    ] = None,
    token_file: TokenFile = None,
    tls: Tls = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    json: Annotated[
        Path | None, option(OUTPUT, "Write all results to this file, under the names that vLLM uses.", metavar="FILE")
    ] = None,
    picture: Annotated[Path | None, option(OUTPUT, "Draw the run to this PNG file.", metavar="FILE")] = None,
) -> int:
    """Send requests to a service over gRPC, each at its planned time (open loop), and check how the service behaves."""
    profile = profile or (SEARCH_PROFILE if find_capacity else None)
    chosen = LoadSettings.of(load_profile(profile) if profile else {}, dict(settings))
    known = {"address": address, "metrics": metrics, "watch_pid": watch_pid, "wait": wait}
    _check_service(serve, serve_arguments or (), known)
    _check_search(chosen, find_capacity, precision)
    _check_files(chosen, {"json": json, "picture": picture})
    token = read_tokens(token_file, "--token-file")[0] if token_file else None
    with ExitStack() as stack:
        if serve:
            err.print("starting smcserve serve")
            child = stack.enter_context(serve_child(serve_arguments or ()))
            address, metrics, watch_pid = child.address, child.metrics, child.pid
        endpoint = ServiceEndpoint(address or DEFAULT_ADDRESS, token, tls, tls_ca, tls_cert, tls_key)
        if wait:
            endpoint.wait(wait)
        service, found = LoadedService.find(endpoint, metrics, watch_pid), None
        if find_capacity:
            searched = runner.find_capacity(service, chosen, precision or PRECISION, report.watch, report.show_probe)
            found, run = asyncio.run(searched)
            report.show_capacity(found, str(chosen.goodput))
            good, numbers = found.good, report.capacity_numbers(found, run)
        else:
            run = asyncio.run(runner.run_once(service, chosen, report.watch))
            report.show_run(run)
            good, numbers = run.good, report.run_numbers(run)
        if json:
            json.write_text(json_module.dumps(finite(numbers)) + "\n")
        if picture:
            from loadtest.picture import draw  # matplotlib takes a second to import

            draw(picture, run, found)
        return 0 if good else 1


def _check_service(serve: bool, serve_arguments: Sequence[str], known: Mapping[str, Any]) -> None:
    """Raise ValueError for options that contradict `--serve`. `known`: values of options that follow from a service
    that is started here."""
    if serve:
        for name, value in known.items():
            if value is not None:
                raise ValueError(f"--{name.replace('_', '-')} has no effect with --serve, which knows it; leave it out")
    elif serve_arguments:
        raise ValueError(f"{' '.join(serve_arguments)!r} has no effect without --serve; leave it out")
    wait = known["wait"]
    if wait is not None and not 0 <= wait <= MAX_WAIT:
        raise ValueError(f"--wait {wait:g}; allowed: 0 to {MAX_WAIT}")


def _check_search(settings: LoadSettings, find_capacity: bool, precision: float | None) -> None:
    """Raise ValueError for settings that a search does not support, and for a precision without a search."""
    if find_capacity:
        if settings.goodput is None:
            raise ValueError("--find-capacity needs --goodput: the objective that a rate meets or misses")
        if settings.arrivals not in ("poisson", "gamma", "constant"):
            raise ValueError(
                f"--find-capacity needs arrivals of one rate, not --arrivals {settings.arrivals}; "
                "allowed: poisson, gamma, constant"
            )
        if settings.capacity is not None:
            raise ValueError(
                "--capacity has no effect with --find-capacity, which finds it; leave out --capacity and --overload"
            )
    elif precision is not None:
        raise ValueError("--precision has no effect without --find-capacity; leave it out")
    if precision is not None and not 0.01 <= precision <= 1:
        raise ValueError(f"--precision {precision:g}; allowed: 0.01 to 1")


def _check_files(settings: LoadSettings, outputs: Mapping[str, Path | None]) -> None:
    """Check the input and output files before a service is started. Raises ValueError or OSError."""
    if settings.trace:
        read_trace(settings.trace)
    if settings.prompts:
        read_prompts(settings.prompts)
    for name, path in outputs.items():
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"--{name} {path}: its directory does not exist; make it first")
    if outputs["picture"] is not None:
        check_drawing()


def joined(arguments: Sequence[str]) -> list[str]:
    """Join the words of `--goodput ttft:500 e2el:5000` to one value, because vLLM accepts them as separate
    arguments."""
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
    try:
        return app(joined(arguments), prog_name="python -m loadtest", standalone_mode=False) or 0
    except USAGE_ERROR as error:
        print_error(f"{error.format_message()} (see python -m loadtest --help)")
        return 2
    except ServiceUnreachable as error:
        print_error(str(error))
        return 3
    except (ValueError, OSError) as error:
        print_error(str(error))
        return 2
    except (KeyboardInterrupt, typer.Abort):
        return 130


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a started service is stopped after SIGTERM, too
    sys.exit(run(sys.argv[1:]))
