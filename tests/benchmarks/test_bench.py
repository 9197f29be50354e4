"""`smcserve bench` on a few rounds: the parts of a round, and refused options."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from benchmarks import advise, prompts
from benchmarks.bench import BenchOptions
from benchmarks.reports.speed import SpeedPlan, latency_of_speeds, speed_table
from benchmarks.speed import Speed
from services.launch.division_choice import DivisionMeasurement
from smc.api.sampling_params import Method
from smc.calibration import latency as timing

CHAT, CODE = "benchmarks/chat_prompts.jsonl", "benchmarks/code_prompts.jsonl"


def test_table_and_file(smcserve, tmp_path):
    path = tmp_path / "bench.json"
    ran = smcserve(
        "bench", "-n", 2, "-k", 3, "-f", 2, "-c", 1, "-c", 2, "--rounds", 3, "--no-prefix-cache", "--json", path
    )
    assert ran.code == 0 and "lockstep" in ran.out and "lookahead" in ran.out
    rows = json.loads(path.read_text())
    assert [(row["form"], row["branches"], row["requests"]) for row in rows] == [
        *(("lockstep", 1, count) for count in (1, 2)),
        *(("lookahead", 2, count) for count in (1, 2)),
    ]
    assert {(row["decoding"], row["tokens"]) for row in rows} == {("distinct", 4), ("distinct", 3)}
    for row in rows:
        assert row["block"] == 3 and row["rounds"] == 3 and row["particles"] == 2
        assert min(row["host"], row["draft"], row["target"]) > 0


@pytest.mark.slow
def test_latency_of_what_ran(smcserve):
    ran = smcserve("bench", "-n", 2, "-k", 3, "-f", 2, "-c", 1, "-c", 4, "--rounds", 2)
    assert ran.code == 0
    *_, curves = ran.out.split("draft step ms")
    rows = [line.split() for line in curves.splitlines() if line.strip()[:1].isdigit()]
    # Draft steps of 2 and 8 rows in lockstep, 4 and 16 in look-ahead; passes of (3 + 1) and 3 positions per row.
    assert [int(row[0]) for row in rows] == [2, 4, 8, 16] and [int(row[2]) for row in rows] == [6, 8, 24, 32]
    assert [row[1] for row in rows] == sorted((row[1] for row in rows), key=float)


@pytest.mark.slow
def test_advice(smcserve, tmp_path, monkeypatch):
    # No size may be omitted for lack of time on a busy machine.
    effort = replace(timing.STEADY, seconds=math.inf, repeats=2, untimed=0, crowd=4, context=128)
    monkeypatch.setattr(timing, "STEADY", effort)
    path, picture = tmp_path / "advice.json", tmp_path / "advice.png"
    options = ("-n", 1, "-n", 2, "-f", 1, "-k", 2, "-k", 4, "-c", 1, "-c", 2, "--json", path, "--picture", picture)
    ran = smcserve("bench", "--advise", "--gpus", 3, "--acceptance", 0.9, "--context", 300, *options)
    assert (
        ran.code == 0
        and "look-ahead 1 + 1" in ran.out
        and "3 x lockstep" in ran.out
        and picture.stat().st_size > 10_000
    )
    found = json.loads(path.read_text())
    assert found["acceptance"] == {"one": 0.9, "gain": 0.6} and list(found["latency"]) == ["1"]
    latency = found["latency"]["1"]
    assert [latency[name]["points"][0][0] for name in ("draft", "target", "alone")] == [1, 6, 1]
    assert latency["draft"]["points"][-1][0] == latency["alone"]["points"][-1][0] == 2 * 2
    assert "ns more for every token of context" in " ".join(
        ran.out.split()
    ) and "requests of 300 tokens each" in " ".join(ran.out.split())
    for requests in (1, 2):
        rows = [row for row in found["speeds"] if row["requests"] == requests]
        assert {row["division"] for row in rows} == {"3 x plain", "3 x lockstep", "look-ahead 1 + 1", "lockstep 1 + 1"}
        assert [row["per_request"] for row in rows] == sorted((row["per_request"] for row in rows), reverse=True)
        assert all(row["setting"] is None or row["setting"]["block"] in (2, 4) for row in rows)


@pytest.mark.slow
def test_advice_from_runs(smcserve, tmp_path, monkeypatch):
    """With processes of their own the best divisions and plain decoding run, and the fastest run wins; what was
    measured is stored for `serve --gpus`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        timing, "STEADY", replace(timing.STEADY, seconds=0.5, repeats=2, untimed=0, crowd=2, context=64)
    )
    for name, value in {"RUN_SECONDS": 0.3, "RUN_ROUNDS": 4}.items():
        monkeypatch.setattr(advise, name, value)
    monkeypatch.setattr(advise.Advisor.acceptance, "__defaults__", (2,))
    path, prompts_file = tmp_path / "advice.json", tmp_path / "prompts.jsonl"
    questions = ("What is 2 + 3?", "Tom has 12 apples and gives 5 away. How many are left?")
    chats = [{"messages": [{"role": "user", "content": question}]} for question in questions]
    prompts_file.write_text("\n".join(map(json.dumps, chats)))
    options = ("-n", 1, "-n", 2, "-f", 1, "-k", 2, "-c", 1, "--json", path, "--prompts-file", prompts_file)
    ran = smcserve("bench", "--advise", "--gpus", 2, "--link", "grpc", *options)
    assert ran.code == 0
    rows = json.loads(path.read_text())["speeds"]
    measured = [row for row in rows if row["measured"] is not None]
    assert rows[: len(measured)] == measured and len(measured) in (3, 4)
    assert [row["measured"] for row in measured] == sorted((row["measured"] for row in measured), reverse=True)
    assert measured[-1]["measured"] > 0 and any("plain" in row["division"] for row in measured)
    said = " ".join(ran.out.split())
    assert f"1 request: {rows[0]['division']} " in said and f"it beat {rows[1]['division']} (" in said
    assert "`smcserve serve --gpus 2` starts the best division" in said
    (stored,) = (tmp_path / "smcserve" / "latency").glob("division-*.json")
    found = DivisionMeasurement.from_json(stored.read_text())
    assert {*found.times.of_target} == {*found.times.of_draft} == {1, 2} and len(found.runs) == len(measured)
    assert found.runs[0].division.name == rows[0]["division"]


def test_exact_decoding_says_what_its_rounds_confirmed(smcserve, tmp_path):
    path = tmp_path / "bench.json"
    assert (
        smcserve("bench", "--method", "exact", "-n", 2, "-k", 3, "-f", 2, "-c", 1, "--rounds", 4, "--json", path).code
        == 0
    )
    rows = json.loads(path.read_text())
    assert {row["decoding"] for row in rows} == {"exact"} and all(1 <= row["tokens"] <= 4 for row in rows)


def test_rejection_says_what_its_rounds_kept(smcserve, tmp_path):
    """Not as many tokens as a round can add: 9 in lockstep, 8 in look-ahead."""
    path, options = tmp_path / "bench.json", ("--method", "exact", "--verification", "rejection", "-n", 1, "-k", 8)
    assert smcserve("bench", *options, "-f", 1, "-c", 2, "--rounds", 4, "--json", path).code == 0
    rows = json.loads(path.read_text())
    assert {row["decoding"] for row in rows} == {"rejection"}
    assert all(1 <= row["tokens"] < (9 if row["form"] == "lockstep" else 8) for row in rows)


@pytest.mark.slow
def test_prompts(smcserve, tmp_path, monkeypatch):
    for name, value in {"REPEATS": 1, "BESIDE_ROUNDS": 8, "WARM_UP": 2}.items():
        monkeypatch.setattr(prompts, name, value)
    path, sizes = tmp_path / "bench.json", ("-n", 2, "-k", 3, "-f", 2)
    ran = smcserve("bench", "--prompts", "-c", 1, *sizes, "--context", 40, "--rounds", 3, "--json", path)
    assert ran.code == 0 and "first token" in " ".join(ran.out.split())
    rows = json.loads(path.read_text())
    cases = [(mode, beside, cached) for beside in (0, 1) for mode in ("plain", "lookahead") for cached in (0, 32)]
    assert [(row["mode"], row["beside"], row["cached"]) for row in rows] == cases
    assert all(
        row["context"] == 40 and row["ttft"] > 0 and (row["round"] is None) == (row["beside"] == 0) for row in rows
    )


def test_prompts_without_the_prefix_cache(smcserve, tmp_path, monkeypatch):
    """Every size has a line that names it, and no prompt is found."""
    for name, value in {"REPEATS": 1, "BESIDE_ROUNDS": 4, "WARM_UP": 1}.items():
        monkeypatch.setattr(prompts, name, value)
    path, sizes = tmp_path / "bench.json", ("-n", 2, "-k", 3, "-k", 2, "-f", 2)
    options = (*sizes, "-c", 1, "--context", 40, "--rounds", 1, "--json", path)
    assert smcserve("bench", "--prompts", "--no-prefix-cache", *options).code == 0
    rows = json.loads(path.read_text())
    assert {row["cached"] for row in rows} == {0}
    shapes = {(row["mode"], row["particles"], row["block"], row["branches"]) for row in rows}
    assert shapes == {("plain", 1, 16, 1), ("lookahead", 2, 3, 2), ("lookahead", 2, 2, 2)}


def test_types_of_either_model(smcserve):
    vocab = ("--draft-vocab", 64, "--draft-vocab-text", __file__)
    assert (
        smcserve(
            "bench", "--target-dtype", "fp8", "--draft-dtype", "fp8", *vocab, "-k", 2, "-f", 1, "-c", 1, "--rounds", 1
        ).code
        == 0
    )
    ran = smcserve("bench", "--target-dtype", "fp6")
    assert (ran.code, ran.out) == (2, "") and "--target-dtype fp6; allowed: float32, bfloat16, float16, fp8" in ran.err


def test_each_method_in_every_mode_of_both_models():
    """Plain decoding is measured once on one GPU and once on the GPUs of both models; each method gets its own options
    only."""
    asked = BenchOptions(
        mode=["plain", "plain-tp", "lookahead"], method=["smc", "exact"], population="independent", link=["nccl"]
    )
    plan = SpeedPlan((1, 1), asked.mode, (4, 8), (5,), (2,), (), (1,), 3, {}, decodings=asked.decodings)
    modes = [line.mode for line in plan.rows(2)]
    assert [(mode.name, mode.degrees) for mode in modes[:2]] == [("plain", (0, 1)), ("plain-tp", (0, 2))]
    decoded = [(mode.method, mode.particles, mode.population) for mode in modes[2:]]
    assert decoded == [(Method.SMC, n, "independent") for n in (4, 8)] + [(Method.EXACT, n, None) for n in (4, 8)]
    assert [line.mode.name for line in plan.rows(1)] == ["plain"]


def test_every_file_of_prompts_at_every_temperature():
    """Loads are compared with plain decoding of the same prompts at the same temperature."""
    prompts, temperatures = {"chat": [[5, 6]], "code": [[7]]}, (0.0, 0.7)
    plan = SpeedPlan(
        (1, 1), ("plain", "lockstep"), (4,), (5,), (2,), (), (1,), 3, {"top_k": 5}, prompts=prompts,
        decodings=[{"method": "exact"}], temperatures=temperatures,
    )  # fmt: skip
    lines = list(plan.rows(1))
    assert [(line.prompts, line.temperature, line.mode.name) for line in lines] == [
        (name, temperature, mode) for name in prompts for temperature in temperatures for mode in plan.modes
    ]
    with pytest.raises(ValueError, match="temperature=-1"):
        replace(plan, temperatures=(0.7, -1.0))
    assert plan.drawn_at(0.7) == {"top_k": 5, "temperature": 0.7} and plan.drawn_at(None) == {"top_k": 5}
    times = dict.fromkeys(("draft", "target", "select", "link", "host", "idle", "floor", "memory", "total"), 1.0)
    shape = {"particles": 4, "block": 5, "branches": 1, "requests": 1, "context": 8, "gpus": 1, "target_gpus": 1}
    rows = [
        Speed(
            line.mode.name, "target" if line.mode.name == "plain" else "exact", **shape, **times, rows=1, alone=0.0,
            prompts=line.prompts, temperature=line.temperature, tokens=4.0, round=5.0, numerics="fastest",
            per_request=100.0 * (1 + number),
        )
        for number, line in enumerate(lines)
    ]  # fmt: skip
    shown = {column.header: list(column.cells) for column in speed_table(rows).columns}
    assert shown["mode"] == ["chat plain", "chat exact lockstep"] * 2 + ["code plain", "code exact lockstep"] * 2
    assert shown["T"] == ["0", "0", "0.7", "0.7"] * 2 and shown["rounds/s"] == ["200"] * 8
    assert shown["x plain"] == ["1.00", "2.00", "1.00", "1.33", "1.00", "1.20", "1.00", "1.14"]


def test_the_target_runs_what_is_asked():
    plan = SpeedPlan((1, 1), ("lockstep",), (8,), (5,), (2,), (), (1,), 3, {}, drafting="adaptive", verified="nodes")
    ((mode, *_),) = plan.rows(1)
    assert mode.config.on_device("cuda").verified == "nodes"


def test_lookahead_drafts_again_as_asked():
    modes, again = ("plain", "lockstep", "lookahead"), "always"
    plan = SpeedPlan((1, 1), modes, (8,), (5,), (2,), (), (1,), 3, {}, redrafting=again)
    assert [line.mode.config.redrafting for line in plan.rows(2)] == ["adaptive", "adaptive", again]


def test_every_mode_runs_with_all_kernels():
    """Lines by the library's products follow those by ours, and all are compared with plain decoding by ours."""
    plan = SpeedPlan(
        (1, 1), ("plain", "lockstep-apart", "lookahead"), (4,), (5,), (2,), (), (1,), 3, {}, kernels=("library", "own")
    )
    lines = [line.mode for line in plan.rows(2)]
    assert [(mode.name, mode.kernels) for mode in lines] == [
        (name, kernels) for name in plan.modes for kernels in ("library", "own")
    ]
    times = dict.fromkeys(("select", "link", "host", "idle", "floor", "memory", "total", "rows", "alone"), 1.0)
    shape = {"particles": 4, "block": 5, "branches": 1, "requests": 1, "context": 8, "gpus": 1, "target_gpus": 1}
    rows = [
        Speed(
            mode.name, "target" if mode.name == "plain" else "exact", **shape, **times, prompts="", temperature=1.0,
            tokens=4.0, round=5.0, draft=1.0, target=2.0, per_request=100.0 * (1 + number), numerics="fastest",
            kernels=mode.kernels,
        )
        for number, mode in enumerate(lines)
    ]  # fmt: skip
    shown = {column.header: list(column.cells) for column in speed_table(rows).columns}
    assert shown["mode"] == [
        *("plain by library", "plain"),
        *("exact lockstep-apart by library", "exact lockstep-apart"),
        *("exact lookahead by library", "exact lookahead"),
    ]
    assert shown["x plain"] == ["0.50", "1.00", "1.50", "2.00", "2.50", "3.00"]
    assert [each.on for each in latency_of_speeds(rows, "always")] == ["a GPU by library", "a GPU"] * 3
    alone = {column.header: list(column.cells) for column in speed_table(rows[::2]).columns}
    assert alone["x plain"] == ["1.00", "3.00", "5.00"]
    with pytest.raises(ValueError, match="--kernels 'cublas'; allowed: own, library"):
        replace(plan, kernels=("own", "cublas"))


def test_what_is_given_twice_is_measured_once():
    """Measurements follow the given order. With a single method, all given options apply to it, and those of another
    method are refused."""
    twice = BenchOptions(
        mode=["lookahead", "plain", "lookahead"], method=["exact", "exact"], verification="rejection", link=["nccl"]
    )
    assert twice.decodings == [{"method": "exact", "verification": "rejection"}]
    assert list(twice.modes) == ["lookahead", "plain"]
    given = {"method": ["smc", "exact", "smc"], "population": "independent"}
    assert BenchOptions(**given).decodings == [{"method": "smc", "population": "independent"}, {"method": "exact"}]


def test_plain_decoding_on_all_gpus_is_measured_once(capsys):
    """If either model has several GPUs, `plain` uses the GPUs of both."""
    plan = SpeedPlan((1, 2), ("plain-tp", "plain", "lookahead"), (4,), (5,), (2,), (), (1, 2), 3, {})
    assert [(line.mode.name, line.mode.degrees) for line in plan.rows(3) if line.requests == 2] == [
        ("plain", (0, 3)),
        ("lookahead", (1, 2)),
    ]
    assert capsys.readouterr().err.splitlines() == ["plain-tp is plain here, on all 3 GPUs: measured once"]
    assert [mode.degrees for mode, *_ in replace(plan, modes=("plain-tp",), concurrency=(1,)).rows(3)] == [(0, 3)]


def test_more_gpus_than_there_are(capsys):
    """The message appears once per mode for any number of loads. It includes plain decoding that needs the GPUs of both
    models."""
    plan = SpeedPlan((1, 3), ("lockstep", "plain", "lookahead"), (4,), (5,), (2,), (), (1, 2), 3, {})
    assert [mode.name for mode, *_ in plan.rows(2)] == ["lockstep"] * 2
    assert capsys.readouterr().err.splitlines() == [
        f"{name} needs 4 GPUs; there are 2: left out" for name in ("plain", "lookahead")
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--concurrency", 0), "--concurrency 0; allowed: >= 1"),
        (("--rounds", 0), "--rounds 0; allowed: >= 1"),
        (("--block", 33), "block=33; allowed: 1..32"),
        (("--method", "target"), "--method target; allowed: smc, exact"),
        (("--method", "exact", "--population", "distinct"), "population='distinct' has no effect with method='exact'"),
        (("--json", "/nowhere/x.json"), "its directory does not exist"),
        (("--mode", "plain"), "has no effect without --device cuda"),
        (("--load", "random"), "has no effect without --device cuda"),
        (("--top-p", 0.9), "--top-p 0.9 has no effect without --device cuda"),
        (("--device", "cuda", "--top-p", 1.5), "top_p=1.5"),
        (
            ("--device", "cuda", "--load", "grown", "--guidance-scale", 2),
            "--guidance-scale 2 draws tokens that the small pair does not have",
        ),
        (("--device", "cuda", "--mode", "lookahead", "--temperature", 0), "temperature=0"),
        (("--advise", "--temperature", 0.7, "--temperature", 1), "--temperature 0.7 1; allowed here: one"),
        (("--prompts-file", CHAT, "--prompts-file", CODE), "allowed here: one"),
        (("--device", "cuda", "--prompts-file", CHAT, "--prompts-file", CHAT), "allowed: files of different names"),
        (("-n", 4, "-n", 8), "allowed without --device cuda: one value"),
        (("--device", "cuda", "--mode", "fast"), "--mode 'fast'; allowed: plain"),
        (("--device", "cuda", "--mode", "plain-tp"), "--mode plain-tp shares the target among processes; give --link"),
        (("--method", "smc", "--method", "exact"), "--method smc exact; allowed here: one"),
        (("--method", "smc", "--method", "target"), "--method target; allowed: smc, exact"),
        (
            ("--method", "smc", "--method", "smc", "--verification", "walk"),
            "verification='walk' has no effect with method='smc'",
        ),
        (("--device", "cuda", "--context", 0), "--context 0; allowed: >= 1"),
        (("--advise", "--acceptance", 1), "--acceptance 1; allowed: between 0 and 1"),
        (("--advise", "--gpus", 0), "--gpus 0; allowed: >= 1"),
        (("--advise", "-n", 0), "particles=0; allowed: "),
        (("--advise", "-k", 33), "block=33; allowed: 1..32"),
        (("--advise", "--context", 0), "--context 0; allowed: >= 1"),
        (("--advise", "--context", 1, "--context", 2), "--context 1 2; allowed with --advise: one"),
        (("--advise", "--mode", "plain"), "--mode ['plain'] has no effect with --advise"),
        (("--advise", "--target-tp", 2), "--target-tp 2 has no effect without --link"),
        (("--advise", "--link", "grpc", "--target-tp", 3), "--target-tp 3; allowed with 2 GPUs: 1..2"),
        (("--advise", "--load", "random"), "--load random does not show what is accepted; give --acceptance"),
        (("--acceptance", 0.9), "--acceptance 0.9 has no effect without --advise"),
        (("--picture", "/tmp/x.png"), "--picture /tmp/x.png has no effect without --advise"),
        (("--prompts", "--context", 0), "--context 0; allowed: >= 1"),
        (("--prompts", "--context", 600), "--context 600; allowed: below 512"),
        (("--prompts", "--mode", "plain"), "has no effect with --prompts on a CPU"),
        (("--prompts", "--link", "grpc"), "--link grpc has no effect with --prompts on a CPU"),
        (
            ("--device", "cuda", "--prompts", "--trace", "/tmp/x.json"),
            "--trace /tmp/x.json has no effect with --prompts",
        ),
        (("--device", "cuda", "--drafting", "adaptive"), "--drafting adaptive has no effect without --method exact"),
        (
            ("--device", "cuda", "--method", "exact", "--verification", "rejection", "--drafting", "adaptive"),
            "--drafting adaptive has no effect with --verification rejection",
        ),
        (("--method", "exact", "--drafting", "adaptive"), "--drafting adaptive has no effect without --device cuda"),
        (("--device", "cuda", "--redrafting", "always"), "--redrafting always has no effect without --method exact"),
        (("--method", "exact", "--redrafting", "never"), "--redrafting never has no effect without --device cuda"),
        (("--device", "cuda", "--method", "exact", "--redrafting", "no"), "redrafting='no'; allowed: adaptive"),
        (
            ("--device", "cuda", "--method", "exact", "--mode", "lockstep", "--redrafting", "always"),
            "--redrafting always has no effect without --mode lookahead",
        ),
        (
            ("--device", "cuda", "--method", "exact", "--verified", "nodes"),
            "--verified nodes has no effect without --drafting adaptive",
        ),
        (
            ("--device", "cuda", "--method", "exact", "--drafting", "adaptive", "--verified", "rows"),
            "verified='rows'; allowed: nodes, paths",
        ),
        (("--numerics", "slow"), "numerics='slow'; allowed: invariant, fastest"),
        (("--numerics", "fastest", "--numerics", "invariant"), "numerics='invariant' has no effect with device='cpu'"),
        (("--prompts", "--numerics", "invariant"), "numerics='invariant' has no effect with device='cpu'"),
        (("--link", "grpc", "--numerics", "invariant"), "numerics='invariant' has no effect with device='cpu'"),
        (
            ("--device", "cuda", "--target-dtype", "float32", "--numerics", "invariant"),
            "numerics='invariant' has no effect with dtype='float32'",
        ),
        (("--advise", "--numerics", "invariant"), "--numerics ['invariant'] has no effect with --advise"),
        (("--advise", "--no-prefix-cache"), "--no-prefix-cache has no effect with --advise"),
        (("--kernels", "library"), "--kernels ['library'] has no effect without --device cuda"),
        (("--advise", "--kernels", "own"), "--kernels ['own'] has no effect with --advise"),
        (
            ("--device", "cuda", "--link", "nccl", "--kernels", "library"),
            "--kernels ['library'] has no effect with --link",
        ),
        (("--device", "cuda", "--prompts", "--kernels", "own"), "--kernels ['own'] has no effect with --prompts"),
        (("--device", "cuda", "--kernels", "cublas"), "--kernels 'cublas'; allowed: own, library"),
        (
            ("--device", "cuda", "--kernels", "own", "--kernels", "library", "--numerics", "invariant"),
            "--kernels library, whose sums have no one order; allowed: --numerics fastest",
        ),
        (("--device", "cuda", "--draft-tp", 2), "--draft-tp 2 has no effect without --link"),
        (("--device", "cuda", "--load", "random"), "--load random needs --target and --draft"),
    ],
)
def test_mistakes(smcserve, arguments, message):
    ran = smcserve("bench", *arguments)
    assert (ran.code, ran.out) == (2, "") and message in ran.err
