"""`smcserve client`: calls a running service. Exit code 1: the service failed; 2: the call was invalid."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from services.cli import options
from services.cli.generate import answer_dict, read_prompt, summary, warn_of_collapses
from services.connection_options import DEFAULT_ADDRESS, SERVICE, Address, Tls, TlsCa, TlsCert, TlsKey, TokenFile
from smc.terminal import err, finite, out, print_error

if TYPE_CHECKING:
    from services.client import Client, Completion, CompletionStream

PARTS = {"": "the service", "smc.draft": "draft group", "smc.target": "target group"}
"""Name in the health service -> name that `health` prints."""
WORKER_GROUP = "smc.worker_group."
"""Beginning of the names of worker groups in the health service; a number follows."""
MISTAKES = ("INVALID_ARGUMENT", "ALREADY_EXISTS", "UNAUTHENTICATED")
"""Status codes of invalid calls, in contrast to failures of the service."""

client = typer.Typer(help="Talk to a running service.")

Timeout = Annotated[
    float | None,
    options.option(
        SERVICE,
        "Abort the call after this many seconds. --time-budget instead returns the answer so far.",
        metavar="SECONDS",
    ),
]
RequestId = Annotated[str | None, options.option(SERVICE, "Id of the request. Default: a random id.", metavar="ID")]
CacheSalt = Annotated[
    str,
    options.option(
        SERVICE, "Share cached prompts only with requests that give the same salt.", metavar="TEXT", show_default=False
    ),
]
LogProbs = Annotated[
    bool, options.flag(options.OUTPUT, "Include the log-probability of every answer token; needs --json.", "--logprobs")
]
TopLogProbs = Annotated[
    int,
    options.option(
        options.OUTPUT,
        "Include the log-probabilities of the K likeliest tokens at each position of the answer; needs --logprobs.",
        "--top-logprobs",
        show_default=False,
        metavar="K",
    ),
]
PromptLogProbs = Annotated[
    int | None,
    options.option(
        options.OUTPUT,
        "Include the log-probabilities of every prompt token and of the K likeliest tokens at its "
        "position; needs --json.",
        "--prompt-logprobs",
        metavar="K",
    ),
]


def _reports_failures(command: Callable[..., int]) -> Callable[..., int]:
    """Wrap a command so that a status code of the service becomes one line and an exit code."""

    @wraps(command)
    def call(*args: Any, **kwargs: Any) -> int:
        from services.client import ServiceError

        try:
            return command(*args, **kwargs)
        except ServiceError as error:
            if error.code.name == "UNAVAILABLE" and "connect" in str(error):
                print_error(f"no service answers at {kwargs['address']}; `smcserve serve` starts a service ({error})")
                return 1
            hint = "" if error.retry_after is None else f" (try again in {error.retry_after:g} s)"
            print_error(f"{error}{hint}")
            return 2 if error.code.name in MISTAKES else 1

    return call


@client.command("generate")
@options.with_settings
@_reports_failures
def generate(
    ctx: typer.Context,
    prompt: Annotated[
        str | None,
        typer.Argument(help="The prompt. If it is '-' or missing, it is read from standard input.", show_default=False),
    ] = None,
    address: Address = DEFAULT_ADDRESS,
    token_file: TokenFile = None,
    tls: Tls = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    timeout: Timeout = None,
    request_id: RequestId = None,
    cache_salt: CacheSalt = "",
    *,
    sampling: Mapping[str, Any],
    negative_prompt: options.NegativePrompt = None,
    raw: options.Raw = False,
    logprobs: LogProbs = False,
    top_logprobs: TopLogProbs = 0,
    prompt_logprobs: PromptLogProbs = None,
    as_json: options.JsonFlag = False,
) -> int:
    """Answer a prompt; text appears as soon as it can no longer change."""
    from services.client import Message

    text = read_prompt(prompt)
    if logprobs and not as_json:
        raise ValueError("--logprobs has no effect without --json; leave it out")
    if prompt_logprobs is not None and not as_json:
        raise ValueError("--prompt-logprobs has no effect without --json; leave it out")
    if timeout is not None and timeout <= 0:
        raise ValueError(f"--timeout {timeout:g}; allowed: above 0 seconds")
    with (
        _connect(options.given(ctx.params)) as service,
        service.stream(
            text if raw else [Message("user", text)],
            timeout=timeout,
            request_id=request_id,
            cache_salt=cache_salt,
            negative_prompt=negative_prompt if raw or negative_prompt is None else [Message("user", negative_prompt)],
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            prompt_logprobs=prompt_logprobs,
            **sampling,
        ) as stream,
    ):
        completion = _follow(stream, as_json)
    warn_of_collapses(completion)
    return 0


@client.command("health")
@_reports_failures
def health(
    ctx: typer.Context,
    address: Address = DEFAULT_ADDRESS,
    token_file: TokenFile = None,
    tls: Tls = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    as_json: options.JsonFlag = False,
) -> int:
    """Show whether the service, its draft group and its target group are ready, and each worker group if there are
    several. Exit code 0 if the service is."""
    with _connect(options.given(ctx.params)) as service:
        states = service.states()
    groups = sorted(int(part.removeprefix(WORKER_GROUP)) for part in states if part.startswith(WORKER_GROUP))
    parts = PARTS | {f"{WORKER_GROUP}{number}": f"worker group {number}" for number in groups}
    if as_json:
        print(json.dumps({name: states[part] for part, name in parts.items()}))
    else:
        out.print(_table((name, states[part]) for part, name in parts.items()))
    return 0 if states[""] == "SERVING" else 1


@client.command("info")
@_reports_failures
def info(
    ctx: typer.Context,
    address: Address = DEFAULT_ADDRESS,
    token_file: TokenFile = None,
    tls: Tls = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    as_json: options.JsonFlag = False,
) -> int:
    """Show what is served, with which settings, and how busy the service is."""
    with _connect(options.given(ctx.params)) as service:
        server, models = asdict(service.server_info()), asdict(service.model_info())
    if as_json:
        print(json.dumps({"server": server, "models": models}))
        return 0
    for number, group in enumerate(server.pop("worker_groups")):
        server[f"worker group {number}"] = ", ".join(
            f"{name.replace('_', ' ')} {value}" for name, value in group.items()
        )
    for role in ("draft", "target"):
        model = models.pop(role)
        models = {
            role: f"{model['name']} ({model['family']}, {model['parameters']:,} parameters, "
            f"TP {model['tensor_parallel']})"
        } | models
    out.print(_table((name.replace("_", " "), value) for name, value in {**models, **server}.items()))
    return 0


def _connect(given: dict[str, Any]) -> Client:
    from services.client import Client
    from services.security import read_tokens

    token = read_tokens(given["token_file"], "--token-file")[0] if "token_file" in given else None
    names = ("tls", "tls_ca", "tls_cert", "tls_key")
    return Client(given["address"], token=token, **{name: given[name] for name in names if name in given})


def _follow(stream: CompletionStream, as_json: bool) -> Completion:
    for chunk in stream:
        if not as_json:
            print(chunk.text, end="", flush=True)
    completion = stream.completion
    assert completion is not None, "a stream that ends well has ended with an answer"
    if as_json:
        answer: dict[str, Any] = {
            "request_id": completion.request_id,
            **answer_dict(completion, completion.usage.prompt_tokens, completion.usage.cached_tokens),
        }
        if completion.logprobs is not None:
            answer["logprobs"] = completion.logprobs
        if completion.top_logprobs is not None:
            answer["top_logprobs"] = completion.top_logprobs
        if completion.prompt_logprobs is not None:
            answer["prompt_logprobs"] = [token._asdict() for token in completion.prompt_logprobs]
        print(json.dumps(finite(answer), ensure_ascii=False))
    else:
        print()
        err.print(Text(summary(completion), style="dim"))
    return completion


def _table(rows: Any) -> Table:
    table = Table(show_header=False, box=None)
    for name, value in rows:
        table.add_row(name, str(value))
    return table
