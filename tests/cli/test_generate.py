"""`smcserve generate` as a user sees it: answers, JSON, standard input, and one-line messages for mistakes."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace

import pytest

from smc.calibration.latency import ONCE
from smc.demo.problems import generate, grade
from tests.model.tiny import save_byte_level, save_tiny

PROBLEM = generate(1, 1, "test")[0]
TARGET = ("generate", PROBLEM.question, "--method", "target")


@pytest.fixture
def typed(monkeypatch):
    """Sets the text on standard input."""
    return lambda text: monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_text_on_stdout_and_statistics_on_stderr(smcserve):
    ran = smcserve("generate", PROBLEM.question, "--method", "smc", "-n", 2, "--seed", 3, "--ess-threshold", 1)
    assert ran.code == 0
    assert re.fullmatch(r"(\d+ [-+*/] \d+ = \d+\n)+#### \d+\n", ran.out)
    for part in (
        r"\d+ tokens in ",
        r"\d+ tok/s",
        r"\d+ rounds",
        r"\d+ resamples",
        r"mean ESS \d+% of N=2",
        r"log Z -?\d",
        "ended by eos",
        "seed 3",
    ):
        assert re.search(part, ran.err), part


@pytest.mark.slow
def test_exact_decoding_is_the_targets_answer(smcserve, monkeypatch, tmp_path):
    monkeypatch.setattr("smc.local_engine.ONCE", replace(ONCE, crowd=1, context=40))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    law = ("--seed", 3)
    ran = smcserve("generate", PROBLEM.question, "--method", "exact", "-n", 4, "-k", 5, *law)
    assert ran.code == 0 and ran.out == smcserve(*TARGET, *law).out
    assert re.search(
        r"\d+ rounds · (\d\.\d tokens confirmed a round · \d+ hits of \d+ · )?(\d particles left · )?ended by eos",
        " ".join(ran.err.split()),
    )
    greedy = json.loads(smcserve("generate", PROBLEM.question, "--temperature", 0, "--form", "lockstep", "--json").out)
    assert greedy["settings"]["sampling"]["method"] == "exact" and greedy["settings"]["engine"]["form"] == "lockstep"
    statistics = greedy["statistics"]
    # On a busy machine, the measured latency model may find that drafting does not pay.
    assert (statistics["accepted_per_round"] > 1 or statistics["alone_rounds"] > 0) and statistics["hits"] == 0


def test_plain_decoding_by_the_target_is_right(smcserve):
    ran = smcserve(*TARGET, "--temperature", 0)
    assert ran.code == 0 and grade(PROBLEM, ran.out)
    assert "ESS" not in ran.err


def test_json_is_one_object_and_says_the_same(smcserve):
    asked = ("generate", PROBLEM.question, "--method", "smc", "-n", 4, "--seed", 3, "-k", 5, "-f", 2)
    text, ran = smcserve(*asked), smcserve(*asked, "--json")
    answer = json.loads(ran.out)
    assert (ran.code, ran.err) == (0, "")
    assert answer["text"] + "\n" == text.out
    assert (answer["finish_reason"], answer["matched"], answer["seed"], answer["error"]) == ("eos", 1, 3, None)
    assert answer["usage"]["answer_tokens"] == len(answer["tokens"])
    assert answer["usage"]["cached_tokens"] == 0
    assert (
        answer["statistics"]["particles"],
        answer["statistics"]["particles_left"],
        answer["statistics"]["preemptions"],
    ) == (4, 4, 0)
    assert answer["settings"]["sampling"]["particles"] == 4 and answer["settings"]["engine"]["prefix_cache"]
    assert (answer["settings"]["engine"]["block"], answer["settings"]["engine"]["branches"]) == (5, 2)


@pytest.mark.parametrize("arguments", [("generate", "-"), ("generate",)])
def test_prompt_on_standard_input(smcserve, typed, arguments):
    typed(PROBLEM.question + "\n")
    law = ("--seed", 5, "-n", 2, "--max-tokens", 5)
    assert smcserve(*arguments, *law).out == smcserve("generate", PROBLEM.question, *law).out


def test_without_a_seed_one_is_drawn_and_reproduces(smcserve):
    asked = ("generate", PROBLEM.question, "-n", 2, "--max-tokens", 6, "--json")
    first = json.loads(smcserve(*asked).out)
    again = json.loads(smcserve(*asked, "--seed", first["seed"]).out)
    assert again["tokens"] == first["tokens"]


def test_text_streams_in_pieces(smcserve, monkeypatch):
    pieces = []
    monkeypatch.setattr("builtins.print", lambda *values, **_: pieces.extend(values))
    assert smcserve(*TARGET, "--seed", 1).code == 0
    assert len(pieces) > 3 and grade(PROBLEM, "".join(pieces))


def test_stops_and_lengths(smcserve):
    stopped = json.loads(smcserve(*TARGET, "--temperature", 0, "--stop", "####", "--json").out)
    assert (stopped["finish_reason"], stopped["matched"]) == ("stop_string", "####") and "#" not in stopped["text"]
    short = json.loads(smcserve(*TARGET, "--max-tokens", 5, "--json").out)
    assert (short["finish_reason"], len(short["tokens"])) == ("length", 5)
    long = json.loads(smcserve(*TARGET, "--ignore-eos", "--max-context", 90, "--json").out)
    assert long["usage"]["prompt_tokens"] + len(long["tokens"]) == 90


def test_conditions(smcserve, tmp_path):
    schema, grammar = tmp_path / "schema.json", tmp_path / "sum.lark"
    schema.write_text('{"enum": [17, "no"], "x-guidance": {"whitespace_flexible": false}}')
    grammar.write_text('start: "a" "b"+ "c"')
    for options, expression in (
        (("--json-schema", schema), '17|"no"'),
        (("--grammar", grammar), "ab+c"),
        (("--regex", "[0-9]{2}"), "[0-9]{2}"),
        (("--choice", "yes", "--choice", "no"), "yes|no"),
    ):
        ran = smcserve(*TARGET, "--max-tokens", 40, *options)
        assert ran.code == 0 and re.fullmatch(expression, ran.out.strip()), ran
    both = smcserve(*TARGET, "--regex", "a", "--choice", "b")
    assert both.code == 2 and "--regex and --choice are given; allowed: one of them" in both.err
    wrong = smcserve(*TARGET, "--regex", "(")
    assert wrong.code == 2 and "--regex: unclosed group" in wrong.err


def test_settings_that_need_not_change_the_answer(smcserve):
    asked = ("generate", PROBLEM.question, "--method", "smc", "-n", 4, "--seed", 3, "--max-tokens", 6, "--json")
    plain, other = (
        json.loads(smcserve(*asked, *options).out) for options in ((), ("--no-prefix-cache", "--min-particles", 2))
    )
    assert other["tokens"] == plain["tokens"]
    assert other["settings"]["sampling"]["min_particles"] == 2 and not other["settings"]["engine"]["prefix_cache"]


def test_raw_prompt_skips_the_template(smcserve):
    prompt = "<|bos|><|user|>" + PROBLEM.question + "<|assistant|>"
    law = ("--seed", 4, "-n", 2, "--max-tokens", 5)
    assert smcserve("generate", prompt, "--raw", *law).out == smcserve("generate", PROBLEM.question, *law).out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--particles", 0), "particles=0; allowed: 1..64"),
        (("--particles", "few"), "'--particles'.*valid integer.*smcserve generate --help"),
        (
            ("--method", "smc", "--temperature", 0),
            "temperature=0.0; allowed: > 0 with method='smc'; for greedy decoding, method='exact'",
        ),
        (("--method", "smc", "--population", "mixed"), "population='mixed'; allowed: distinct, independent"),
        (("--method", "exact", "--population", "distinct"), "population='distinct' has no effect with method='exact'"),
        (("--alpha", 2), "alpha=2.0 has no effect with method='exact'; give method='smc', or leave it out"),
        (("--method", "smc", "--particles", 4, "--min-particles", 5), "min_particles=5; allowed: 1..4"),
        (("--min-particles", 1, "--method", "target"), "min_particles=1 has no effect with method='target'"),
        (("--particles", 4, "--method", "target"), "particles=4 has no effect with method='target'"),
        (("--branches", 2, "--method", "draft"), "branches=2 has no effect with method='draft'"),
        (("--branches", 2, "--form", "lockstep"), "branches=2 has no effect with form='lockstep'"),
        (("--method", "beam"), "method='beam'; allowed: smc, exact, target, draft"),
        (("--method", "smc", "--resampling", "none"), "resampling='none'; allowed: systematic"),
        (("--block", 0), "block=0; allowed: 1..32"),
        (("--max-tokens", 10**9), "max_tokens=1000000000 after a prompt of"),
        (("--max-context", 4096), "max_context=4096; allowed: 2..512"),
        (("--target", "somewhere"), "--target is given without --draft"),
        (("--draft", "somewhere"), "--draft is given without --target"),
        (("--target", "nowhere", "--draft", "nowhere"), "nowhere/config.json is missing"),
        (("--device", "tpu"), "--device tpu; allowed: cpu, cuda"),
        (("--dtype", "int3"), "--dtype int3; allowed: float32"),
        (("--draft-dtype", "int3"), "--draft-dtype int3; allowed: float32, bfloat16, float16, fp8"),
        (("--draft-vocab", 100), "draft_vocab=100 needs draft_vocab_text"),
        (("--draft-vocab-text", "nowhere"), "draft_vocab_text='nowhere' has no effect without draft_vocab"),
        (("--draft-vocab", 100, "--draft-vocab-text", "nowhere"), "draft_vocab_text='nowhere' cannot be read"),
        (("--draft-vocab", 100, "--method", "target"), "draft_vocab=100 has no effect with method='target'"),
        (("--numerics", "exact"), "numerics='exact'; allowed: invariant, fastest"),
        (("--numerics", "invariant"), "numerics='invariant' has no effect with device='cpu'; leave it out"),
        (("--threads", 0), "--threads 0; allowed: >= 1"),
        (("--beams", 3), "No such option: --beams"),
    ],
)
def test_mistakes(smcserve, arguments, message):
    ran = smcserve("generate", PROBLEM.question, *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: ") and re.search(message, ran.err) and "Traceback" not in ran.err


def test_prompts_that_are_none(smcserve, typed):
    typed("\n")
    assert "the prompt is empty" in smcserve("generate").err
    long = smcserve("generate", "apples " * 600)
    assert long.code == 2 and "allowed: at most 511" in long.err


def test_missing_shard_is_named(smcserve, tmp_path):
    for role in ("target", "draft"):
        save_byte_level(save_tiny(tmp_path / role, vocab_size=304))
    (tmp_path / "draft" / "model.safetensors").unlink()
    ran = smcserve("generate", "hello", "--target", tmp_path / "target", "--draft", tmp_path / "draft")
    assert ran.code == 2 and "draft: " in ran.err and "safetensors" in ran.err


def test_own_pair_without_a_template_needs_raw(smcserve, tmp_path):
    for role in ("target", "draft"):
        save_byte_level(save_tiny(tmp_path / role, vocab_size=304))
    pair = ("--target", tmp_path / "target", "--draft", tmp_path / "draft")
    assert "use --raw" in smcserve("generate", "hello", *pair).err
    ran = smcserve("generate", "hello", "--raw", *pair, "--max-tokens", 8, "-n", 3, "--threads", 1, "--json")
    assert len(json.loads(ran.out)["tokens"]) <= 8
