"""Runs a whole distillation in rounds: the target writes, the draft learns, the draft is measured.

All processes run the same rounds on data of their own; the first one also measures, saves and reports. Everything that
decides the next step is in the checkpoint or follows from the seed and the step, so a run of given `tokens` that was
killed resumes with the same bits. In a run of given `minutes`, the clock decides the number of steps."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from smc.distill.conversations import ConversationStore, TalkSettings, TalkWriter, replace_file
from smc.distill.measure import HeldOut, Measurement, pair_latency, write_card
from smc.distill.student import Student, StudentSpec, check_student, choose_layers, cut, make_student, save_student
from smc.distill.trainer import Ranks, Trainer, TrainingSettings
from smc.local_engine import ModelPair
from smc.memory.kv_cache import KVPool
from smc.model.config import ModelConfig
from smc.model.decoder import Decoder
from smc.model.draft_vocab import save_counts
from smc.model.loader import load_model
from smc.model.tokenizer import Tokenizer

WORK = ".distill"
"""Folder in the draft's directory for the files that a run needs to resume."""
CHECKPOINT, SETTINGS = "checkpoint.pt", "settings.json"
PROMPT_COUNT = "prompt_count"
"""Key in the settings of the number of prompts that the run began with."""
SAMPLE = 16
"""Number of conversations on which the choice of layers is based."""
REUSE = 4
"""Number of times that a run of given `tokens` learns from each token that was written."""
FIRST_ROUND = 64
"""Minimum number of conversations, besides those held out, that a process writes before it learns."""
POOL_SHARE = 0.35
"""Share of a GPU's free memory for the keys and values of the conversations that are being written."""
MEASURING_SHARE = 0.2
"""Maximum share of the remaining time for measuring; the last round is always measured."""
GAIN, PATIENCE = 0.001, 3
"""The run ends when the overlap has gained less than `GAIN` in `PATIENCE` rounds."""
LAST_PART = 0.85
"""Fraction of a run after which it does not end early, because the falling learning rate still improves the draft."""
SECONDS_BETWEEN_CHECKPOINTS = 60.0

Report = Callable[[str], None]


@dataclass(frozen=True)
class DistillConfig:
    """Settings of a run. Raises ValueError naming the field."""

    target: Path
    out: Path
    minutes: float | None = None
    """Wall time of the whole run; None if `tokens` is given."""
    tokens: int | None = None
    """Number of answer tokens to learn from, counted each time that a token is seen; None if `minutes` is given."""
    student: StudentSpec = field(default_factory=StudentSpec)
    talk: TalkSettings = field(default_factory=TalkSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    temperatures: tuple[float, ...] = (1.0, 0.7)
    """Temperatures at which trees are measured."""
    prompts: tuple[tuple[int, ...], ...] = ()
    """Token ids of given prompts, template included, with which conversations begin."""
    mixed: bool = True
    """Whether the target also writes user turns of its own, besides the given prompts."""
    rounds: int = 8
    write_share: float = 0.4
    """Share of each round's time for writing."""
    device: str = "cpu"
    processes: int = 1
    slots: int = 32
    """Number of conversations that a process writes at once."""
    held_out: int = 24
    """Number of conversations that are held out for measuring."""
    contexts: int = 160
    """Approximate number of contexts after which trees are grown, at each temperature."""
    times_models: bool = True
    """Whether to measure how long steps and passes take, for expected speeds."""
    resume: bool = False

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.tokens is None):
            raise ValueError(f"minutes={self.minutes} and tokens={self.tokens}; give exactly one of them")
        for name in ("minutes", "tokens", "rounds", "processes", "slots", "held_out", "contexts"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value}; allowed: above 0")
        if not 0 < self.write_share < 1:
            raise ValueError(f"write_share={self.write_share}; allowed: between 0 and 1, both excluded")
        if self.training.batch % self.processes:
            raise ValueError(f"batch={self.training.batch} is not a multiple of processes={self.processes}")

    @property
    def work(self) -> Path:
        return self.out / WORK

    def must_agree(self) -> dict[str, Any]:
        """Return the settings that a resumed run must not change."""
        values = asdict(replace(self, resume=False, out=Path(), prompts=()))
        prompts = hashlib.sha256(repr(self.prompts).encode()).hexdigest()
        return json.loads(json.dumps(values | {"prompts": prompts, PROMPT_COUNT: len(self.prompts)}, default=str))


def distill(config: DistillConfig, report: Report) -> Measurement:
    """Train a draft and write its directory. `report` is called with lines about the run. Returns the last measurement.
    Raises ValueError for a target or a directory that cannot be used."""
    config = _prepare(config)
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "rendezvous"
        spawn = multiprocessing.get_context("spawn")
        others = [
            spawn.Process(target=_run_rank, args=(config, rank, meeting), daemon=True)
            for rank in range(1, config.processes)
        ]
        for other in others:
            other.start()
        try:
            return _run_rank(config, 0, meeting, report)
        finally:
            for other in others:
                other.join(timeout=30)
                other.kill()


def _prepare(config: DistillConfig) -> DistillConfig:
    """Check that the directory can be used. Returns the configuration of the run: a resumed run keeps the prompts that
    it began with, even if more have been appended to their file."""
    settings, student = config.work / SETTINGS, config.student
    if settings.exists() and not config.resume:
        raise ValueError(f"{config.out} holds a run; continue it with --resume, or give another --out")
    if not settings.exists():
        if config.resume:
            raise ValueError(f"{config.out} holds no run to resume; leave out --resume")
        if (config.out / "config.json").exists():
            raise ValueError(f"{config.out} holds a model, which the draft would replace; give another --out")
        check_student(ModelConfig.from_hf(config.target).on_device(config.device), config.target, student)
        shutil.rmtree(config.work, ignore_errors=True)  # left by a run that did not begin
        return config
    before = json.loads(settings.read_text())
    config = replace(config, prompts=config.prompts[: before.get(PROMPT_COUNT)])
    now = config.must_agree()
    if now["prompts"] != before.get("prompts"):
        raise ValueError(f"the prompts are not those that the run in {config.out} began with; give the same file")
    if changed := [name for name in now if before.get(name) != now[name]]:
        name = changed[0]
        raise ValueError(f"{name}={now[name]!r}, but the run in {config.out} has {before.get(name)!r}; give the same")
    return config


def end_with_parent() -> None:
    """Make this process end when the one that started it ends, even if that one is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait(sentinel: int) -> None:
        multiprocessing.connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=wait, args=(parent.sentinel,), daemon=True).start()


def _run_rank(config: DistillConfig, rank: int, meeting: Path, report: Report = lambda line: None) -> Measurement:
    if rank:
        end_with_parent()
    if config.processes > 1 and config.device == "cpu":
        torch.set_num_threads(1)
    ranks = Ranks.join(rank, config.processes, meeting, config.device == "cuda")
    try:
        distillation = Distillation(config, ranks, report)
        if ranks.is_first and not (settings := config.work / SETTINGS).exists():
            # Written only now, so that a run that cannot begin leaves its directory free.
            replace_file(settings, lambda opened: opened.write(json.dumps(config.must_agree(), indent=2).encode()))
        return distillation.run()
    finally:
        ranks.leave()


@dataclass
class _RunState:
    """State of a run, besides weights."""

    round: int = 0
    step: int = 0
    trained_tokens: int = 0
    seconds: float = 0.0
    """Seconds of the run until this state was saved."""
    available: int = 0
    """Number of its conversations that this process learns from in this round; 0: they are not written yet."""
    done: bool = False
    history: list[Measurement] = field(default_factory=list)
    writing: dict[str, float] = field(default_factory=lambda: {"seconds": 0.0, "drawn": 0.0})
    begin: float = 0.0
    """Seconds at which the first round began: before that, models were loaded and kernels compiled."""
    measuring_seconds: float = 0.0
    """Duration of the last measurement."""
    training_seconds: float = 0.0


def seconds_of_round(left: float, rounds: int, measuring: float) -> float:
    """Return the seconds for writing and learning in the next round, if all remaining rounds get the same time. `left`:
    remaining seconds of the run. `rounds`: maximum number of remaining rounds. `measuring`: seconds that the last
    measurement took. If measuring takes long, there are fewer rounds, so that learning gets most of the time."""
    if measuring:
        rounds = max(1, min(rounds, int(MEASURING_SHARE * left / measuring)))
    return max(0.0, left / rounds - measuring)


class Distillation:
    """One process of a run."""

    def __init__(self, config: DistillConfig, ranks: Ranks, report: Report) -> None:
        self._began = time.monotonic()
        self.config, self.ranks, self._report = config, ranks, report
        self.device = f"cuda:{ranks.rank}" if config.device == "cuda" else "cpu"
        on_gpu = config.device == "cuda"
        self.target = load_model(config.target, dtype=torch.bfloat16 if on_gpu else torch.float32, device=self.device)
        self.tokenizer = Tokenizer.load(config.target)
        self.vocab = min(self.tokenizer.size, self.target.config.vocab_size)
        self.store = ConversationStore(config.work / "data" / f"{ranks.rank}", config.talk.width)
        self.state = _RunState()
        self._first = config.held_out if ranks.is_first else 0
        """Index of the first conversation that is not held out."""
        self._counted, self._count_V = 0, np.zeros(self.tokenizer.size, dtype=np.int64)
        """Number of conversations whose answer tokens have been counted, and the counts."""
        self.writer = make_writer(config, self.target, self.tokenizer, self.store, ranks)
        self._saved = time.monotonic()
        self._round_seconds, self._round_end = 0.0, 0.0
        """Duration of the current round in seconds, and the time at which it ends."""

    @property
    def seconds(self) -> float:
        return self.state.seconds + time.monotonic() - self._began

    @property
    def progress(self) -> float:
        """Completed fraction of all rounds, on this process's clock."""
        if self.config.tokens is not None:
            return self.state.trained_tokens / self.config.tokens
        return min(1.0, (self.seconds - self.state.begin) / max(1.0, self._budget - self.state.begin))

    @property
    def _budget(self) -> float:
        """Seconds of the whole run."""
        assert self.config.minutes is not None
        return 60 * self.config.minutes

    def run(self) -> Measurement:
        checkpoint = self._load_checkpoint()
        # The held-out conversations, and the sample for the choice of layers.
        self._write(lambda: len(self.store) >= self._first + SAMPLE)
        self.student = self._make_student(checkpoint)
        self.trainer = Trainer(
            self.target, self.student.model, self.vocab, self.config.talk.width, self.config.training, self.ranks
        )
        if checkpoint is not None:
            self.trainer.optimizer.restore(checkpoint["optimizer"])
        config, held_out = self.config, None
        if self.ranks.is_first:
            rows = self.store.rows(range(config.held_out))
            held_out = HeldOut(rows, config.temperatures, config.contexts, config.talk.seed)
        latency = self._latency() if self.ranks.is_first and config.times_models else None
        if checkpoint is None:
            self.state.begin = self.seconds
        while not self.state.done:
            self._write_round()
            self._train_round()
            self.state.round += 1
            self.state.available = 0
            if held_out is not None:
                self._measure(held_out, latency)
            self.state.done = self.ranks.first(self._is_done())
            self._save_checkpoint()
            if self.ranks.is_first:
                self._save_draft()
        if not self.state.step:
            self._say("writing conversations took all the time, so the draft was not trained; give more --minutes")
        self.state.history = self.ranks.first(self.state.history)
        return self.state.history[-1]

    # Writing

    def _write_round(self) -> None:
        """Write this round's share, unless a checkpoint says that it has been written."""
        if self.config.minutes is not None:
            left, rounds = max(0.0, self._budget - self.seconds), self.config.rounds - self.state.round
            self._round_seconds = seconds_of_round(left, rounds, self.state.measuring_seconds)
            self._round_end = time.monotonic() + self._round_seconds
        if self.state.available:
            return
        config = self.config
        if config.tokens is not None:
            wanted = config.tokens * (self.state.round + 1) / (config.rounds * REUSE * config.processes)
            self._write(lambda: self._is_enough() and self.store.tokens >= wanted)
        else:
            stop = time.monotonic() + config.write_share * self._round_seconds
            self._write(lambda: self._is_enough() and time.monotonic() >= stop)
        self.state.available = len(self.store)

    def _is_enough(self) -> bool:
        return len(self.store) >= self._first + FIRST_ROUND

    def _write(self, until: Callable[[], bool]) -> None:
        began, drawn = time.monotonic(), self.writer.drawn
        self.writer.write(until)
        took, written = time.monotonic() - began, self.writer.drawn - drawn
        self.state.writing["seconds"] += took
        self.state.writing["drawn"] += written
        if written:
            dropped = ", ".join(f"{count} {reason}" for reason, count in self.writer.dropped.items())
            self._say(
                f"wrote {written:,} tokens in {took:.1f} s ({written / took:,.0f} a second); "
                f"{len(self.store):,} conversations, {self.store.tokens:,} answer tokens; dropped: {dropped or 'none'}"
            )

    # Learning

    def _make_student(self, checkpoint: dict[str, Any] | None) -> Student:
        spec = self.config.student
        layers: tuple[int, ...] = ()
        if checkpoint is not None:
            layers = tuple(checkpoint["layers"])
        elif self.ranks.is_first:
            layers = choose_layers(self.target, spec, self.store.rows(range(SAMPLE)), self.vocab)
        self.layers = self.ranks.first(layers)
        student = make_student(self.target, self.config.target, spec, self.layers)
        self._say(
            f"draft: {student.origin}; {student.trained_weights:,} weights are trained, of "
            f"{sum(weight.numel() for weight in student.model.parameters()):,}"
        )
        return student

    def _train_round(self) -> None:
        began, before, first_step = time.monotonic(), self.state.trained_tokens, self.state.step
        # Some time is left for learning, however long writing has taken.
        stop = max(self._round_end, began + (1 - self.config.write_share) / 2 * self._round_seconds)
        while True:
            progress, is_over = self.ranks.first((self.progress, self._is_round_over(stop)))
            if is_over:
                break
            rows = self._batch()
            result = self.trainer.step(rows, self.state.step, progress)
            self.state.step += 1
            self.state.trained_tokens += result.tokens
            if self.state.step % 20 == 0 or self.state.step == first_step + 1:
                overlap = result.overlap.item() * self.ranks.count / max(1, result.tokens)
                self._say(f"step {self.state.step}, {progress:.0%}: overlap of the batch {overlap:.3f}", transient=True)
            if self.ranks.first(time.monotonic() - self._saved > SECONDS_BETWEEN_CHECKPOINTS):
                self.state.training_seconds += time.monotonic() - began
                began = time.monotonic()
                self._save_checkpoint()
        if self.device != "cpu":
            torch.cuda.synchronize()
        took = time.monotonic() - began
        self.state.training_seconds += took
        trained = self.state.trained_tokens - before
        if trained:
            self._say(
                f"{self.state.step - first_step} steps on {trained:,} answer tokens; "
                f"{self.state.training_seconds:.1f} s "
                f"of training in all, {self.state.trained_tokens / self.state.training_seconds:,.0f} answer tokens a "
                "second"
            )

    def _is_round_over(self, stop: float) -> bool:
        if self.config.tokens is not None:
            return self.progress >= (self.state.round + 1) / self.config.rounds
        return time.monotonic() >= stop

    def _batch(self) -> np.ndarray:
        """Draw this process's share of a batch, which the seed, the rank and the step decide."""
        generator = np.random.default_rng([self.config.talk.seed, self.ranks.rank, self.state.step])
        count = self.config.training.batch // self.ranks.count
        return self.store.rows(generator.integers(self._first, self.state.available, count).tolist())

    # Measuring

    def _latency(self) -> Any:
        pair = ModelPair(self.target, self.student.model, self.tokenizer, self.target.config.max_context)
        latency = pair_latency(pair)
        self._say("latency model: none" if latency is None else f"latency model: {latency}")
        return latency

    def _measure(self, held_out: HeldOut, latency: Any) -> None:
        began = time.monotonic()
        found = held_out.measure(
            self.target,
            self.student.model,
            self.vocab,
            latency,
            seconds=self.seconds,
            step=self.state.step,
            trained_tokens=self.state.trained_tokens,
            written_tokens=self.store.tokens,
        )
        self.state.history.append(found)
        self.state.measuring_seconds = time.monotonic() - began
        self._say(f"round {self.state.round} of {self.config.rounds}: {found}")

    def _is_done(self) -> bool:
        progress, overlaps = self.progress, [each.overlap for each in self.state.history]
        if progress >= 1 or self.state.round >= self.config.rounds:
            return True
        stale = len(overlaps) > PATIENCE and overlaps[-1] < overlaps[-1 - PATIENCE] + GAIN
        if stale and progress < LAST_PART:
            self._say(f"the overlap has grown by less than {GAIN} in {PATIENCE} rounds: the run ends")
            return True
        return False

    # Files

    def _load_checkpoint(self) -> dict[str, Any] | None:
        path = self.config.work / CHECKPOINT
        if not path.exists():
            return None
        checkpoint = torch.load(path, map_location=self.device, weights_only=True)
        state = checkpoint["state"]
        state["available"] = state["available"][self.ranks.rank]
        state["history"] = [Measurement.from_dict(each) for each in state["history"]]
        self.state = _RunState(**state)
        self._say(f"resumes at step {self.state.step}, after {self.state.seconds:.0f} s")
        return checkpoint

    def _save_checkpoint(self) -> None:
        """Save the checkpoint. Raises ValueError for weights that are not finite; the previous checkpoint is kept
        then."""
        if not self.trainer.optimizer.is_finite:
            raise ValueError(
                f"after step {self.state.step} the draft's weights are not finite; start again in another --out with a "
                f"lower --rate than {self.config.training.optimizer.peak_rate:g}"
            )
        available = self.ranks.gather(self.state.available)
        if self.ranks.is_first:
            state = asdict(replace(self.state, seconds=self.seconds)) | {"available": available}
            saved = {"state": state, "layers": self.layers, "optimizer": self.trainer.optimizer.state()}
            replace_file(self.config.work / CHECKPOINT, lambda opened: torch.save(saved, opened))
        self._saved = time.monotonic()

    def _save_draft(self) -> None:
        config, writing = self.config, self.state.writing
        save_student(self.student, config.target, config.out)
        self._count_V += self.store.answer_counts(self._counted, self.tokenizer.size)
        self._counted = len(self.store)
        save_counts(config.out, self._count_V)
        record = {
            "target": config.target.name,
            "draft": self.student.origin,
            "trained_weights": self.student.trained_weights,
            "loss": config.training.loss,
            "temperatures_written": config.talk.temperatures,
            "temperatures_measured": config.temperatures,
            "conversations": len(self.store) - config.held_out,
            "held_out": config.held_out,
            "prompts": len(config.prompts),
            "seed": config.talk.seed,
            "device": torch.cuda.get_device_name() if config.device == "cuda" else "cpu",
            "processes": config.processes,
            "torch": torch.__version__,
            "seconds": round(self.seconds, 1),
            "tokens_a_second": {
                "written": writing["drawn"] / max(1e-9, writing["seconds"]),
                "trained": self.state.trained_tokens / max(1e-9, self.state.training_seconds),
            },
            "training": asdict(config.training),
            "history": [asdict(each) for each in self.state.history],
        }
        write_card(config.out, record, self.state.history)

    def _say(self, line: str, transient: bool = False) -> None:
        if self.ranks.is_first:
            self._report(f"\r{line}" if transient else f"[{self.seconds:6.1f} s] {line}")


def make_writer(
    config: DistillConfig, target: Decoder, tokenizer: Tokenizer, store: ConversationStore, ranks: Ranks
) -> TalkWriter:
    """Create the writer of this process's conversations. On a GPU, its KV memory is at most `POOL_SHARE` of the free
    memory."""
    on_gpu, pages = config.device == "cuda", None
    # The engine needs a draft, which takes no part in plain decoding.
    pair = ModelPair(target, cut(target, (0,)), tokenizer, target.config.max_context)
    block = 16 if on_gpu else 8
    if on_gpu:
        free, _ = torch.cuda.mem_get_info(target.embed.weight.device)
        page_bytes = sum(KVPool.page_bytes(model.config, torch.bfloat16) for model in (pair.target, pair.draft))
        pages = min(int(POOL_SHARE * free) // page_bytes, config.slots * (config.talk.width + 2 * block))
    return TalkWriter(
        pair,
        config.talk,
        store,
        slots=config.slots,
        pages=pages,
        block=block,
        prefill_chunk=8192 if on_gpu else 1024,
        first=ranks.rank,
        stride=ranks.count,
        prompts=config.prompts,
        mixed=config.mixed,
    )
