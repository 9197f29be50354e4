"""`smcserve generate`: answers one prompt with an engine in this process."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from services.cli import options
from smc.api.limits import DEFAULT_MAX_TOKENS
from smc.api.request import Answer, Request, check_guidance, fit_of_answer
from smc.api.sampling_params import SamplingParams, with_defaults
from smc.model.config import GENERATION_CONFIGS, sampling_defaults
from smc.terminal import err, finite, number, print_error, print_warning

if TYPE_CHECKING:
    from services.client import Completion
    from smc.api.engine_config import EngineConfig
    from smc.local_engine import ModelPair

PAIR_FIELDS = ("form", "branches", "draft_vocab", "draft_vocab_text")
"""Settings that affect only methods that use both models."""
PLAIN = ("target", "draft")
"""Methods that use one model."""


@options.with_settings
def generate(
    ctx: typer.Context,
    prompt: Annotated[
        str | None,
        typer.Argument(help="The prompt. If it is '-' or missing, it is read from standard input.", show_default=False),
    ] = None,
    target: options.Target = None,
    draft: options.Draft = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = None,
    target_dtype: options.TargetDtype = None,
    draft_dtype: options.DraftDtype = None,
    draft_vocab: options.DraftVocab = None,
    draft_vocab_text: options.DraftVocabText = None,
    generation_config: options.GenerationConfig = None,
    *,
    sampling: Mapping[str, Any],
    negative_prompt: options.NegativePrompt = None,
    raw: options.Raw = False,
    engine: Mapping[str, Any],
    no_prefix_cache: options.NoPrefixCache = False,
    threads: options.Threads = None,
    as_json: options.JsonFlag = False,
) -> int:
    """Answer a prompt; text appears as soon as it can no longer change."""
    text = read_prompt(prompt)
    from smc.loading import loaded_models, pair_directories, require_directories, use_threads

    directories = pair_directories(target, draft)
    given = options.given(ctx.params)
    _refuse_idle(given)
    require_directories(directories)
    if generation_config not in (None, *GENERATION_CONFIGS):
        raise ValueError(f"--generation-config {generation_config}; allowed: {', '.join(GENERATION_CONFIGS)}")
    if generation_config != "ignore":
        sampling = with_defaults(sampling, sampling_defaults(directories[0]))
    check_guidance(
        SamplingParams(**sampling), negative_prompt is not None
    )  # before torch is imported, which takes seconds
    models = loaded_models(
        "files", directories, device, dtype, target_dtype, draft_dtype, draft_vocab, draft_vocab_text
    )
    use_threads(threads, directories)
    pair = models.pair(device, device)
    return _answer(pair, directories, *_settings(pair, text, raw, given, engine, sampling), as_json)


def read_prompt(prompt: str | None) -> str:
    if prompt is None and sys.stdin.isatty():
        raise ValueError("no prompt; give it as an argument or on standard input")
    text = sys.stdin.read().removesuffix("\n") if prompt in (None, "-") else prompt
    if not text:
        raise ValueError("the prompt is empty")
    return text


def _refuse_idle(given: dict[str, Any]) -> None:
    """Raise ValueError for `PAIR_FIELDS` with a method that uses one model. The library refuses a setting without
    effect only if the cause is in the same object; here the method is in another one."""
    for name in PAIR_FIELDS:
        if given.get("method") in PLAIN and name in given:
            raise ValueError(f"{name}={given[name]!r} has no effect with method={given['method']!r}; leave it out")


def _settings(
    pair: ModelPair,
    text: str,
    raw: bool,
    given: dict[str, Any],
    engine: Mapping[str, Any],
    sampling: Mapping[str, Any],
) -> tuple[Request, EngineConfig]:
    """Return the request and the engine's configuration. Only given options are passed on: the library has its own
    defaults, and refuses settings without effect."""
    from smc.api.engine_config import EngineConfig

    if not raw and not pair.tokenizer.has_chat_template:
        raise ValueError("the target model has no chat template; use --raw to give it the prompt as plain text")
    config = EngineConfig(**engine, prefix_cache="no_prefix_cache" not in given)
    config.check_numerics(pair.target.embed.weight.device.type, given.get("dtype"))
    prompt, away = tuple(_encoded(pair, text, raw)), given.get("negative_prompt")
    negative = None if away is None else tuple(_encoded(pair, away, raw))
    room = (config.max_context or pair.max_context) - max(len(prompt), len(negative or ()))
    longest = max(1, min(DEFAULT_MAX_TOKENS, room))
    params = SamplingParams(**{"max_tokens": longest, **sampling})
    return Request("generate", prompt, params, negative_prompt=negative), config


def _encoded(pair: ModelPair, text: str, raw: bool) -> Sequence[int]:
    return pair.tokenizer.encode(text) if raw else pair.tokenizer.chat([{"role": "user", "content": text}])


def _answer(
    pair: ModelPair, directories: tuple[Path, Path], request: Request, config: EngineConfig, as_json: bool
) -> int:
    from smc.local_engine import fitted_engine, stored_latency
    from smc.scheduler.methods import rules_of

    latency = None
    if rules_of(request.params).adaptive(request.params):
        # As in a service, with a latency model, so that the engine does not use a draft that does not help.
        latency = stored_latency(pair, directories, replace(config, max_slots=request.params.rows))
    name = request.params.potential
    engine = fitted_engine(pair, config, [request], potentials=options.load_own([(name, name)]) if name else {})
    engine.latency = latency
    for output in engine.run([request]):
        if not as_json:
            print(output.text, end="", flush=True)
        answer = output.answer
    assert answer is not None
    if as_json:
        print(json.dumps(finite(_as_dict(answer, request, engine.config)), ensure_ascii=False))
    else:
        print()
        err.print(Text(summary(answer), style="dim"))
    warn_of_collapses(answer)
    if words := fit_of_answer(request.params, answer.statistics, len(answer.tokens)):
        print_warning(words)
    if answer.error:
        print_error(answer.error)
    return 1 if answer.error else 0


def summary(answer: Answer | Completion) -> str:
    """Summarise an answer in one line."""
    stats = answer.statistics
    parts = [
        f"{len(answer.tokens)} tokens in {answer.seconds:.2f} s",
        f"{len(answer.tokens) / answer.seconds:.0f} tok/s",
    ]
    if stats is not None:
        parts += [f"{stats.rounds} rounds"]
    if stats is not None and stats.accepted_per_round > 0:
        parts += [f"{stats.accepted_per_round:.1f} tokens confirmed a round"]
        parts += [f"{stats.hits} hits of {stats.hits + stats.misses}"] if stats.hits + stats.misses else []
    if stats is not None and stats.mean_ess > 0:
        parts += [f"{stats.resamples} resamples"] if stats.resamples else []
        parts += [
            f"mean ESS {stats.mean_ess / stats.particles:.0%} of N={stats.particles}",
            f"log Z {number(stats.log_z, '+.2f')}",
        ]
    if stats is not None and stats.particles_left < stats.particles:
        parts += [f"{stats.particles_left} particles left"]
    if stats is not None and stats.preemptions:
        parts += [f"preempted {stats.preemptions} times"]
    ended = f"ended by {answer.finish_reason}" + (f" {answer.matched!r}" if isinstance(answer.matched, str) else "")
    return " · ".join([*parts, ended, f"seed {answer.seed}"])


def warn_of_collapses(answer: Answer | Completion) -> None:
    if answer.statistics is not None and answer.statistics.collapses:
        print_warning(
            f"all weights were zero after {answer.statistics.collapses} rounds; the answer continued from prefixes "
            "with weight"
        )


def answer_dict(answer: Answer | Completion, prompt_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Return an answer as a dict for --json."""
    return {
        "text": answer.text,
        "tokens": answer.tokens,
        "finish_reason": answer.finish_reason,
        "matched": answer.matched,
        "seed": answer.seed,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "cached_tokens": cached_tokens,
            "answer_tokens": len(answer.tokens),
            "seconds": answer.seconds,
            "tokens_per_second": len(answer.tokens) / answer.seconds,
        },
        "statistics": None if answer.statistics is None else asdict(answer.statistics),
    }


def _as_dict(answer: Answer, request: Request, config: EngineConfig) -> dict[str, Any]:
    sampling = {key: value for key, value in asdict(request.params).items() if value is not None}
    idle = PAIR_FIELDS if request.params.method.plain else ()
    return {
        **answer_dict(answer, answer.prompt_tokens, answer.cached_tokens),
        "error": answer.error,
        "settings": {"sampling": sampling, "engine": {k: v for k, v in asdict(config).items() if k not in idle}},
    }
