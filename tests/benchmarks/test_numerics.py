"""Orders of sums side by side in `smcserve bench`: engines get the one that was asked, and every line names the one
that ran."""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest
import torch

from benchmarks import bench, processes, prompts, speed
from benchmarks.backends import CpuBackend, Mode, read_bytes
from benchmarks.load import Load
from benchmarks.processes import ProcessBackend
from benchmarks.reports.speed import SpeedPlan, curve_tables, in_turn, latency_of_speeds, measure_speed, speed_table
from benchmarks.speed import ModeTimer, Speed, TimedRounds
from services.launch.config import WorkerGroupConfig
from smc import demo
from smc.api.engine_config import EngineConfig
from smc.api.sampling_params import Method
from smc.local_engine import ModelPair
from smc.scheduler.engine import Engine
from smc.scheduler.speculation import LatencyCurve, LatencyModel, ModelLatency
from smc.types import ModelRole
from tests.model.tiny import random_decoder, tiny_config
from tests.scheduler.pairs import tokenizer_of

BOTH = ["fastest", "invariant"]
ASKED = ("--numerics", "fastest", "--numerics", "invariant", "--numerics", "fastest")


def pair() -> ModelPair:
    """A pair in float16, which Triton's interpreter multiplies."""
    texts = string.ascii_letters
    shape = {"vocab_size": len(texts) + 1, "hidden_size": 64, "head_dim": 16, "intermediate_size": 64}
    draft, target = (
        random_decoder(tiny_config("qwen3", num_layers=1, max_context=256, **shape), seed).half() for seed in (1, 2)
    )
    return ModelPair(target, draft, tokenizer_of(texts), 256)


class Recording(CpuBackend):
    """Keeps the mode of every engine with the numerics that it was asked for, and those that its statistics name."""

    def __init__(self, models: ModelPair) -> None:
        super().__init__(models)
        self.asked: list[tuple[str, str]] = []
        self.ran: list[dict[ModelRole, str]] = []

    @contextmanager
    def engine(self, mode: Mode, config: EngineConfig) -> Iterator[Engine]:
        self.asked.append((mode.name, config.numerics))
        with super().engine(mode, config) as engine:
            yield engine
            self.ran.append({role: one.value for role, one in engine.take_stats().numerics.items()})

    def weight_bytes(self, mode: Mode, role: ModelRole) -> int:
        return read_bytes(getattr(self._pair, role))

    def memory(self, mode: Mode) -> int:
        return 0


@pytest.fixture
def run_bench(smcserve, tmp_path, monkeypatch):
    """Run `smcserve bench` as on two GPUs, with all engines from this backend. Returns its output and its lines."""
    for module, name, value in (
        (speed, "WARM_UP", 1), (prompts, "WARM_UP", 1), (prompts, "REPEATS", 1), (prompts, "BESIDE_ROUNDS", 8),
        (prompts, "BESIDE_TOKENS", 8),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr("smc.calibration.forecast.PLAIN_BLOCK", 2)

    def run(backend: Recording, *options: object) -> tuple[str, list[dict]]:
        @contextmanager
        def backends(*_):
            yield backend, 2

        monkeypatch.setattr(bench, "_backend", backends)
        path = tmp_path / "bench.json"
        sizes = ("--context", 12, "-n", 2, "-k", 2, "-f", 2, "-c", 1, "--rounds", 1)
        ran = smcserve("bench", "--device", "cuda", *sizes, "--json", path, *options)
        assert ran.code == 0
        return ran.out, json.loads(path.read_text())

    return run


@pytest.fixture
def kernels(monkeypatch):
    """Rounds run by kernels, in Triton's interpreter."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the kernels run on the GPU itself")
    from tests.executor.test_kernels import KERNELS

    monkeypatch.setattr("smc.local_engine.ops_for", lambda _device: KERNELS)


def numerics_column(shown: str) -> list[str]:
    """Return the cells below `numerics` in the first table."""
    header, _, *lines = itertools.dropwhile(lambda line: line.split()[:1] != ["mode"], shown.splitlines())
    at = header.index("numerics")
    return [line[at:].split()[0] for line in itertools.takewhile(str.strip, lines)]


MODES = [
    ("plain", "target"), ("lockstep", "exact"), ("lockstep", "distinct"), ("lookahead", "exact"),
    ("lookahead", "distinct"),
]  # fmt: skip
OF_ALL = ("--mode", "plain", "--mode", "lockstep", "--mode", "lookahead", "--method", "exact", "--method", "smc")


def test_every_mode_and_method_in_both(kernels, run_bench):
    backend = Recording(pair())
    shown, rows = run_bench(backend, *OF_ALL, *ASKED)
    assert backend.asked == [(mode, one) for mode, _ in MODES for one in BOTH]
    assert backend.ran == [dict.fromkeys(ModelRole, one) for _ in MODES for one in BOTH]
    lines = [(row["mode"], row["decoding"], row["numerics"]) for row in rows]
    assert lines == [(*mode, one) for mode in MODES for one in BOTH]
    assert numerics_column(shown) == BOTH * 5 and "numerics: order of sums that ran" in shown


def test_lines_name_what_ran(run_bench):
    """Torch on a CPU promises no order of sums."""
    backend = Recording(pair())
    shown, rows = run_bench(backend, "--mode", "plain", "--mode", "lockstep", *ASKED)
    assert [one for _, one in backend.asked] == BOTH * 2 and all({*one.values()} == {"fastest"} for one in backend.ran)
    assert numerics_column(shown) == ["fastest"] * 4 == [row["numerics"] for row in rows]


def test_a_line_is_invariant_if_all_its_models_are(kernels, run_bench):
    """Kernels have no order for float32 weights."""
    models = pair()
    backend = Recording(replace(models, draft=models.draft.float()))
    shown, rows = run_bench(backend, "--mode", "plain", "--mode", "lockstep", "--numerics", "invariant")
    assert backend.ran == [{"draft": "fastest", "target": "invariant"}] * 2
    assert numerics_column(shown) == ["invariant", "fastest"] == [row["numerics"] for row in rows]


def test_prompts_in_both(kernels, run_bench):
    backend = Recording(pair())
    shown, rows = run_bench(backend, "--prompts", "--mode", "plain", *ASKED)
    assert [one for _, one in backend.asked] == BOTH * 2  # alone, and beside another request
    assert backend.ran == [dict.fromkeys(ModelRole, one) for one in BOTH * 2]
    assert [(row["beside"], row["numerics"]) for row in rows[::2]] == list(itertools.product((0, 1), BOTH))
    assert numerics_column(shown) == [row["numerics"] for row in rows] and "numerics: order of sums that ran" in shown


def test_prompts_of_both_models_name_what_ran(run_bench):
    backend = Recording(pair())
    shown, rows = run_bench(backend, "--prompts", "--mode", "lookahead", *ASKED)
    assert backend.asked == [("lookahead", one) for one in BOTH * 2]
    assert numerics_column(shown) == ["fastest"] * 8 == [row["numerics"] for row in rows]


def test_no_curves_of_guided_requests(run_bench):
    """They run two positions for each token, one of them unconditional."""
    models = ModelPair.load(demo.TARGET, demo.DRAFT)
    assert "draft step ms" in run_bench(Recording(models), "--mode", "lockstep")[0]
    assert "draft step ms" not in run_bench(Recording(models), "--mode", "lockstep", "--guidance-scale", 1.5)[0]
    assert "draft step ms" in run_bench(Recording(models), "--mode", "lockstep", "--guidance-scale", 1)[0]


def test_no_column_for_the_default(run_bench):
    shown, rows = run_bench(Recording(pair()), "--mode", "plain", "--numerics", "fastest")
    assert "numerics" not in shown and [row["numerics"] for row in rows] == ["fastest"]
    shown, rows = run_bench(Recording(pair()), "--prompts", "--mode", "plain")
    assert "numerics" not in shown and {row["numerics"] for row in rows} == {"fastest"}


def test_adaptive_drafting_times_the_models_in_each(monkeypatch):
    """Trees are chosen by the times of the passes that run."""
    timed: list[str] = []

    def measured(engine: Engine, effort: object) -> LatencyModel:
        timed.append(engine.config.numerics)
        fast = ModelLatency(LatencyCurve(((1, 1e-3),)))
        return LatencyModel(fast, fast, fast, 0.0)

    monkeypatch.setattr("benchmarks.advise.measure_latency", measured)
    monkeypatch.setattr(speed, "SETTLED", 2)
    monkeypatch.setattr(speed, "_warm_up", lambda *_: None)
    plan = SpeedPlan(
        (1, 1), ("lockstep",), (2,), (2,), (2,), (12,), (1, 2), 2, {}, decodings=[{"method": "exact"}],
        drafting="adaptive", numerics=BOTH,
    )  # fmt: skip
    assert len(measure_speed(plan, Recording(pair()), 1, None, lambda found: None)) == 4 and timed == BOTH


@pytest.mark.parametrize("drafting", ["adaptive", "always"])
def test_tokens_a_second_are_those_of_all_rounds(drafting, monkeypatch):
    """Of ten rounds, four decode alone: 8 tokens in 40 ms. The other six bring 3 in 10. Two of three requests ran. With
    fixed trees rounds are alike, and the median leaves out those that compile."""
    spans = [(i, 0.040 if i % 5 > 2 else 0.010) for i in range(10)]
    seen = TimedRounds(spans, [1e-3] * 10, [{"target": (0, 1)}] * 10, [0] * 10, delivered=2 * 50, took_part=2 * 10)
    monkeypatch.setattr(ModeTimer, "_watch", lambda *_: seen)
    monkeypatch.setattr(speed, "_warm_up", lambda *_: None)
    monkeypatch.setattr(speed, "SETTLED", 2)
    fast = ModelLatency(LatencyCurve(((1, 1e-3),)))
    latency = LatencyModel(fast, fast, fast, 0.0) if drafting == "adaptive" else None
    mode = Mode("lockstep", Method.EXACT, EngineConfig(form="lockstep", block=2, drafting=drafting), 2, (0, 1))
    (row,) = ModeTimer(Recording(pair()), latency=lambda _: latency).run(mode, [Load(3, [[1, 2]] * 3, None)], 10)
    rate, whole = (50 / 0.220, 22.0) if drafting == "adaptive" else (5 / 0.010, 10.0)
    assert row.tokens == 5 and row.round == pytest.approx(whole)
    assert row.per_request == pytest.approx(rate) and row.total == pytest.approx(2 * rate)
    assert row.steps is None, "nothing was drafted"


def line(numerics: str, speed: float, mode: str = "plain") -> Speed:
    times = dict.fromkeys(("select", "link", "host", "idle", "floor", "memory", "total", "alone", "rows"), 1.0)
    return Speed(
        mode, "target" if mode == "plain" else "exact", numerics, particles=1, block=1, branches=1, requests=1,
        context=8, prompts="", temperature=1.0, gpus=1, target_gpus=1, tokens=1.0, round=1.0, draft=1.0,
        target=1e3 / speed, per_request=speed, **times,
    )  # fmt: skip


def test_lines_are_compared_with_plain_decoding_of_their_numerics():
    rows = [line(one, 100.0 - each, mode) for mode in ("plain", "lockstep") for each, one in zip((0, 20), BOTH)]
    rows = [*rows[:2], *(replace(row, per_request=2 * row.per_request) for row in rows[2:])]
    ratios = [list(each.cells) for each in speed_table(rows).columns if each.header == "x plain"]
    assert ratios == [["1.00", "1.00", "2.00", "2.00"]]
    # If the draft alone does not run invariant, there is one plain decoding to compare with.
    (ratios,) = [list(each.cells) for each in speed_table([rows[1], rows[2]]).columns if each.header == "x plain"]
    assert ratios == ["1.00", "2.50"]


def test_no_latency_curve_of_both():
    titles = [table.title for table in curve_tables(latency_of_speeds([line(one, 50.0) for one in BOTH], "always"))]
    assert titles == [f"target on a GPU, {one}" for one in BOTH]


@pytest.mark.parametrize(
    ("degrees", "modes", "turns"),
    [
        ((1, 1), ("plain", "lookahead"), [("plain", *BOTH), ("lookahead", *BOTH)]),
        # Ranks that share a model are loaded for one order of sums.
        ((1, 2), ("lockstep-apart", "lookahead"), [
            ("lockstep-apart", "fastest"), ("lookahead", "fastest"), ("lockstep-apart", "invariant"),
            ("lookahead", "invariant"),
        ]),
    ],
)  # fmt: skip
def test_turns(degrees, modes, turns):
    plan = SpeedPlan(degrees, modes, (2,), (2,), (2,), (12,), (1,), 2, {}, numerics=BOTH)
    found = [(mode.name, mode.config.numerics) for _, (mode, *_) in in_turn(list(plan.rows(4)))]
    assert found == [(mode, one) for mode, *each in turns for one in each]


@pytest.mark.parametrize(("degrees", "kept"), [((1, 1), True), ((1, 2), False)])
def test_processes_are_kept_unless_their_ranks_share_a_model(degrees, kept, monkeypatch):
    class Started:
        def __init__(self, *_) -> None:
            pass

        def close(self) -> None:
            pass

    monkeypatch.setattr(processes, "RankProcesses", Started)
    with closing(ProcessBackend(WorkerGroupConfig())) as machine:
        first, second, third = (
            machine._for(Mode("lookahead", Method.EXACT, EngineConfig(numerics=one), 2, degrees))
            for one in (*BOTH, "invariant")
        )
    assert (second is first) == kept and third is second
