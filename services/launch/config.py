"""What the service is made of: models, degrees, link, engine, deadlines. Checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from services.backend import Model, ServingPair
from services.link.connect import LINKS
from smc import demo
from smc.engine.config import EngineConfig
from smc.engine.kvrows import SIDES
from smc.models.check import require_pair
from smc.models.parallel import Shard, local_config
from smc.models.tokenizer import Tokenizer

DEVICES = {"cpu": "float32", "cuda": "bfloat16"}
"""Device -> the type that models have there unless another is asked for."""
LONGEST = 1_000_000
"""Of deadlines, in seconds: torch and Ray take neither infinity nor what their clocks cannot count to."""
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class GangConfig:
    """The processes that decode. Raises ValueError naming the field, the value and what is allowed."""

    target: Path = demo.TARGET
    """Directory of the target model; it must exist on every host, under the same path."""
    draft: Path = demo.DRAFT
    target_tp: int = 1
    """Tensor-parallel degree of the target: that many processes, each with its share of the heads."""
    draft_tp: int = 1
    link: str = "nccl"
    """`nccl`: torch.distributed (NCCL between GPUs, gloo elsewhere); `grpc`: streams, for hosts that gloo does not reach."""
    device: str = "cpu"
    """`cpu`, or `cuda`: one GPU for each rank."""
    dtype: str | None = None
    """Default: float32 on a CPU, bfloat16 on a GPU."""
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(cohorts=2))
    threads: int = 1
    """CPU threads of torch in each rank."""
    start_timeout: float = 600.0
    """Seconds until every rank must have loaded its weights and run a warm-up round."""
    link_timeout: float = 60.0
    """Seconds after which a silent process counts as dead. It must exceed the longest prefill chunk and the longest round."""
    heartbeat: float = 2.0
    """Seconds between signs of life while nothing runs."""
    trace: Path | None = None
    """Where the coordinator writes a Chrome trace of all rounds when it stops."""

    def __post_init__(self) -> None:
        for name, allowed in (("link", LINKS), ("device", DEVICES), ("dtype", (None, *DTYPES))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}; allowed: {', '.join(filter(None, allowed))}")
        if self.dtype is None:
            object.__setattr__(self, "dtype", DEVICES[self.device])
        for name in ("threads", "start_timeout", "link_timeout", "heartbeat"):
            if not 0 < getattr(self, name) <= LONGEST:
                raise ValueError(f"{name}={getattr(self, name)!r}; allowed: above 0, at most {LONGEST}")
        if self.heartbeat >= self.link_timeout:
            raise ValueError(
                f"heartbeat={self.heartbeat:g}; allowed: below link_timeout={self.link_timeout:g}, or silence looks like death"
            )
        if self.trace is not None and not self.trace.absolute().parent.is_dir():
            raise ValueError(f"trace={str(self.trace)!r}: its directory does not exist")

    def degree(self, side: str) -> int:
        return self.draft_tp if side == "draft" else self.target_tp

    def directory(self, side: str) -> Path:
        return (self.draft if side == "draft" else self.target).absolute()

    def serving_pair(self) -> ServingPair:
        """Look at both models without loading them. Raises ValueError if they cannot be served this way."""
        report = require_pair(self.target, self.draft)
        models = {}
        for side in SIDES:
            one, degree = getattr(report, side), self.degree(side)
            try:
                local_config(one.config, Shard(0, degree))
            except ValueError as error:
                raise ValueError(f"{side}_tp={degree}: {error}") from error
            models[side] = Model(self.directory(side).name, one.config, one.parameters, degree)
        return ServingPair(
            **models,
            tokenizer=Tokenizer.load(self.target),
            context=self.engine.context(report.max_context),
            engine=self.engine,
            link=self.link,
        )
