"""The interface between the gateway (or the batch command) and its backend, which decodes requests: a request goes in,
final tokens come out.

The service's backend is `services.launch.balancer.Balancer`, which sends each request to the
`services.coordinator.client.CoordinatorClient` of one of its worker groups."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from smc.api.engine_config import EngineConfig
from smc.api.request import Output, Request
from smc.api.sampling_params import Method, SamplingParams
from smc.model.config import ModelConfig
from smc.model.tokenizer import Tokenizer
from smc.types import Numerics

ENGINE_FIELDS = ("form", "block", "branches", "defensive_share")
"""Settings of the engine that answers depend on."""
MAX_SALT_SIZE = 256
"""Maximum length of a cache salt in characters."""
WITHOUT_EFFECT = (
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("bad_words", "constraint", "constraint_scope", "potential", "answer", "prompt_logprobs"),
)
"""Settings that are left out of the fingerprint, because they change nothing unless a request gives them. So batch runs
of earlier versions, which did not have these settings, can be resumed."""


CHOSEN_AT_START = 0
"""Number of a draft's ranks where they choose it themselves, see `services.workers.draft_part`."""
START_STEPS = ("reserve", "load", "prepare")
"""Steps of the start of a worker group, in order."""


class Unavailable(RuntimeError):
    """The service cannot decode now: it is starting, draining, or has lost a worker. Trying again later may work."""


class DraftUnavailable(Unavailable):
    """The request needs the draft, which the worker group had lost before the request came. Another worker group may
    decode it now."""


@dataclass(frozen=True)
class StartProgress:
    """Progress of the start of a worker group."""

    step: str
    """`reserve`: the worker group waits for CPUs or GPUs; `load`: it loads weights; `prepare`: it prepares memory,
    kernels and links."""
    percent: Mapping[str, int] = field(default_factory=dict)
    """Percentage of each model's weights that is loaded, by the model's role; empty in step `reserve`."""
    warmed: int | None = None
    """Percentage of the warm-up that is done, in step `prepare`; None: it has not begun, or there is none."""

    def __str__(self) -> str:
        if self.step == "load":
            return ", ".join(f"{percent}% of the {role}" for role, percent in self.percent.items()) + " loaded"
        prepare = "both models are loaded; warming up and timing them, about 20 s, on a GPU up to some minutes"
        if self.warmed is not None:
            prepare = f"both models are loaded; {self.warmed}% of the warm-up done, then the models are timed"
        return {"reserve": "waiting for CPUs or GPUs", "prepare": prepare}[self.step]


class Unimplemented(RuntimeError):
    """A method of an API that this service does not support; the message says why, or names the alternative."""


class RequestFailed(RuntimeError):
    """Decoding this request failed; the message names the cause."""


class RequestAborted(RuntimeError):
    """The request was ended by `Abort`."""


@dataclass(frozen=True)
class Model:
    """One model of the pair, as reported to users."""

    name: str
    config: ModelConfig
    parameters: int
    tensor_parallel: int
    """Number of ranks among which it is divided, or `CHOSEN_AT_START`."""
    weights: str = ""
    """Fingerprint of the weights, see `smc.model.files`."""


@dataclass(frozen=True)
class ServingPair:
    """The served model pair; known before any worker runs."""

    target: Model
    draft: Model
    tokenizer: Tokenizer
    context: int
    """Longest prompt plus answer, in tokens."""
    engine: EngineConfig
    link: str
    """`nccl`, `grpc`, or `local` for workers in this process."""
    files: Path | None = None
    """Directory with the tokenizer's files; None: the tokenizer does not come from files."""
    dtypes: str = "float32"
    """Data types of both models, as `smc.model.source.name_dtypes` writes them."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of `SamplingParams` that the target's checkpoint brings, by name."""
    placement: str = "apart"
    """`apart`: each model has processes of its own; `shared`: every process has its share of both."""

    def fingerprint(self) -> str:
        """Return a hash of what answers depend on besides the request: two services, or runs of a batch, with the same
        fingerprint give the same answers for the same seeds. Of a model, its name, its number of parameters and the
        fingerprint of its weights count."""
        engine = self.engine
        settings = {name: getattr(engine, name) for name in ENGINE_FIELDS}
        # Left out where they are what earlier versions had.
        if engine.fixed_block != engine.block:
            settings["smc_block"] = engine.fixed_block
        if engine.numerics != Numerics.FASTEST:
            settings["numerics"] = engine.numerics
        models = [(model.name, model.parameters, model.weights) for model in (self.target, self.draft)]
        # A setting that a request leaves out has the default of the library or of the checkpoint.
        defaults = [
            {name: value for name, value in asdict(params).items() if name not in WITHOUT_EFFECT} | dict(self.sampling)
            for params in (SamplingParams(), SamplingParams(method=Method.SMC))
        ]
        parts = [models, settings, defaults, self.context, self.dtypes]
        return f"smc_{hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]}"


class Backend(Protocol):
    """Decodes requests. Used from one asyncio loop."""

    def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """Yield updates of one request until its answer. Closing the iterator early aborts the request.

        Raises ValueError (the request is wrong), QueueFull (a retry may work), Unavailable, RequestFailed. Request ids
        need not be unique.
        """
        ...


def check_cache_salt(salt: str) -> None:
    """Check the cache salt of a request. Raises ValueError if it is too long or not valid Unicode."""
    if len(salt) > MAX_SALT_SIZE:
        raise ValueError(f"cache_salt has {len(salt)} characters; allowed: at most {MAX_SALT_SIZE}")
    try:
        salt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"cache_salt={salt!r}; allowed: valid Unicode text") from error
