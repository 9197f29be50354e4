"""How fast a model pair decodes on GPUs, mode by mode in one process: plain decoding by the target beside every form of SMC.

Weights may be random: no token is ever rejected, so speed does not depend on what they are.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from smc.engine.admission import pages_needed
from smc.engine.config import EngineConfig
from smc.engine.engine import Engine
from smc.engine.messages import SIDES
from smc.engine.request import Method, Request, SamplingParams
from smc.engine.rounds import Rounds
from smc.engine.worker import ModelWorker
from smc.models.decoder import Decoder
from smc.models.presets import NoText
from smc.resident.kernels import gpu_parts
from smc.resident.pair import LocalPair

BANDWIDTH = 4.26e12
"""Bytes a second that an H200 reads and writes in a device copy."""
WARM_UP = 4
"""Rounds before the clock starts: the first two compile and record."""
LONG_PROMPT = 1024
PLAIN_BLOCK = 16
"""Tokens that plain decoding queues at a time."""


@dataclass(frozen=True)
class Mode:
    """One line of the table."""

    name: str
    method: Method
    config: EngineConfig
    particles: int
    devices: tuple[str, str]
    """Of draft and target."""


@dataclass(frozen=True)
class Speed:
    """Medians over rounds; milliseconds unless said otherwise."""

    mode: str
    particles: int
    block: int
    branches: int
    requests: int
    context: int
    """Prompt tokens."""
    gpus: int
    per_request: float
    """Answer tokens a second, of one request."""
    total: float
    """Answer tokens a second, of all."""
    round: float
    draft: float
    """The draft's K steps."""
    target: float
    """The target's pass; in lockstep with the choice."""
    host: float
    """The host's time to plan and queue a round, which hides behind the models unless it is longer."""
    idle: float
    """Share of the round in which the slower side has nothing to do."""
    floor: float
    """Share of the time that reading the weights once for every pass would take at full bandwidth."""
    memory: float
    """GiB, of the fullest GPU."""


@dataclass(frozen=True)
class Recorded:
    """One turn of the host's loop, and the round that it read. Nanoseconds of the host's monotonic clock."""

    begin: int
    end: int
    waited: tuple[int, int]
    """When the host did nothing else."""
    worked: dict[str, tuple[int, int]]
    """By side."""


class DeviceClock:
    """Puts events of one GPU on the host's clock, to within some ten microseconds."""

    def __init__(self, device: str) -> None:
        with torch.cuda.device(device):
            self._event = torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            self._event.record()
            self._event.synchronize()
        self._at = time.monotonic_ns()

    def nanoseconds(self, event: torch.cuda.Event) -> int:
        return self._at + int(1e6 * self._event.elapsed_time(event))


class Bench:
    """A pair of decoders, timed. Both are already where they are to run, maybe more than once."""

    def __init__(
        self, models: Callable[[str, str], Decoder], vocab: int, on_round: Callable[[Recorded], None] | None = None, **options: bool
    ) -> None:
        """`models` gives the model of a side on a device; `on_round` is told of every timed round; options are those of `KernelForward`."""
        self._models, self._vocab, self._on_round, self._options = models, vocab, on_round, options

    def run(self, mode: Mode, requests: int, context: int, rounds: int) -> Speed:
        """Time `rounds` rounds of that many requests side by side."""
        stride = _stride(mode)
        answer = stride * (rounds + WARM_UP + 4) + 1
        particles = mode.particles if mode.method is Method.SMC else None
        params = SamplingParams(method=mode.method, particles=particles, seed=1, max_tokens=answer, ignore_eos=True)
        prompts = torch.randint(10, self._vocab, (requests, context), generator=torch.Generator().manual_seed(1)).tolist()
        asked = [Request(str(i), tuple(prompt), params) for i, prompt in enumerate(prompts)]
        engine = self._engine(mode, asked, context + answer)
        for request in asked:
            engine.submit(request)
        while engine.num_running < requests:
            engine.step()
        for _ in range(WARM_UP):
            engine.step()
        speed = self._timed(mode, engine, requests, context, rounds, stride)
        del engine
        gc.collect()
        torch.cuda.empty_cache()
        return speed

    def _timed(self, mode: Mode, engine: Engine, requests: int, context: int, rounds: int, stride: int) -> Speed:
        source = engine.rounds_of(mode.method)
        spans, hosts, parts = [], [], []
        clocks = {side: DeviceClock(device) for side, device in zip(("draft", "target"), mode.devices)}
        torch.cuda.synchronize()
        last = time.perf_counter()
        for _ in range(rounds):
            source.queued = 0.0
            engine.step()
            now = time.perf_counter()
            spans.append(now - last)
            hosts.append(source.queued)
            parts.append(_parts(source.last.marks))
            if self._on_round is not None:
                self._on_round(_recorded(last, now, source, clocks))
            # Not a later time: the GPUs go on while this is being written down, and what is left out would make them look faster.
            last = now
        whole = statistics.median(spans)
        draft, target = (statistics.median(column) / 1e3 for column in zip(*parts))
        busy = draft + target if mode.config.form == "lockstep" or mode.method is not Method.SMC else max(draft, target)
        return Speed(
            mode=mode.name,
            particles=mode.particles if mode.method is Method.SMC else 1,
            block=mode.config.block,
            branches=mode.config.branches if mode.method is Method.SMC else 1,
            requests=requests,
            context=context,
            gpus=len(set(mode.devices)) if mode.method is Method.SMC else 1,
            per_request=stride / whole,
            total=requests * stride / whole,
            round=1e3 * whole,
            draft=1e3 * draft,
            target=1e3 * target,
            host=1e3 * statistics.median(hosts),
            idle=max(0.0, 1 - busy / whole),
            floor=self._floor(mode) / whole,
            memory=max(torch.cuda.max_memory_allocated(device) for device in mode.devices) / 2**30,
        )

    def _engine(self, mode: Mode, asked: list[Request], context: int) -> Engine:
        needs = [pages_needed(request, mode.config) for request in asked]
        pages = {side: max(2, sum(need.get(side, 0) for need in needs)) for side in SIDES}
        rows = sum(request.params.rows for request in asked)
        prompts = sum(len(request.prompt) for request in asked)
        # All at once, so that they start together; long ones in pieces, as their attention is made in torch.
        chunk = prompts if len(asked[0].prompt) <= LONG_PROMPT else 512
        config = replace(mode.config, max_slots=rows, max_context=context, prefill_chunk=chunk)
        workers = {}
        for side, device in zip(SIDES, mode.devices):
            model = self._models(side, device)
            sizes = {"rows": config.max_slots, "width": config.width(context), "pages": pages[side], "vocab_size": self._vocab}
            workers[side] = ModelWorker(side, model, **sizes)
        pair = LocalPair(config, workers, gpu_parts(**self._options))
        return Engine(config, workers, NoText(self._vocab), pair=pair, pages=pages, context=context)

    def _floor(self, mode: Mode) -> float:
        """Seconds."""
        draft, target = (_weight_bytes(self._models(side, device)) / BANDWIDTH for side, device in zip(SIDES, mode.devices))
        if mode.method is Method.TARGET:
            return mode.config.block * target
        if mode.config.lookahead and mode.devices[0] != mode.devices[1]:
            return max(mode.config.block * draft, target)
        return mode.config.block * draft + target


def _stride(mode: Mode) -> int:
    plain = mode.method is not Method.SMC
    return mode.config.block if plain or mode.config.lookahead else mode.config.block + 1


def _parts(marks: dict[str, tuple[torch.cuda.Event, torch.cuda.Event]]) -> tuple[float, float]:
    """Milliseconds of the draft and of the target; 0 where a model has no part in it."""
    return tuple(marks[side][0].elapsed_time(marks[side][1]) if side in marks else 0.0 for side in SIDES)


def _recorded(begin: float, end: float, source: Rounds, clocks: dict[str, DeviceClock]) -> Recorded:
    marks = source.last.marks
    worked = {side: tuple(clocks[side].nanoseconds(mark) for mark in marks[side]) for side in SIDES if side in marks}
    shift = time.monotonic_ns() - int(1e9 * time.perf_counter())
    return Recorded(int(1e9 * begin) + shift, int(1e9 * end) + shift, source.waited, worked)


def _weight_bytes(model: Decoder) -> int:
    """Of all weights that a pass reads: the embedding only if it is the head as well."""
    unread = 0 if model.config.tied_embeddings else model.embed.weight.numel()
    return sum(w.numel() * w.element_size() for w in model.parameters()) - unread * model.embed.weight.element_size()
