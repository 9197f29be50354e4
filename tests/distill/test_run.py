"""Training: overlap follows its definition and rises, two processes have the gradients of one, a killed run resumes
with the same bits, and every command accepts the draft.

Local axes: Z conversations."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from smc.distill.conversations import Conversation, ConversationStore, TalkSettings, replace_file
from smc.distill.measure import HeldOut
from smc.distill.run import distill, seconds_of_round
from smc.distill.student import StudentSpec, candidate_layers, choose_layers, cut, make_student, save_student
from smc.distill.trainer import Ranks, Trainer, TrainingSettings
from smc.model.check import require_pair
from smc.model.decoder import Decoder
from smc.model.draft_vocab import load_counts
from smc.model.loader import load_model, save_model
from smc.model.tokenizer import Tokenizer
from tests.distill.running import (
    AT_ONCE,
    CONFIG,
    VOCAB,
    children,
    config_of,
    gradients,
    kill_after_a_round,
    run_distill,
    student,
    tiny_target,
)
from tests.model.dense import dense_logits
from tests.model.families import save_hf
from tests.model.foreign import VOCAB as FOREIGN_VOCAB
from tests.model.foreign import save_foreign_pair
from tests.model.tiny import random_decoder, save_byte_level, save_sentencepiece, save_tiny

# torch's optimisers import its compiler, and so does transformers: two seconds, once.
pytestmark = pytest.mark.xdist_group("transformers")
WAITING = """
import sys, time
from multiprocessing import get_context
from pathlib import Path
from smc.distill.run import end_with_parent

def wait_for_ever():
    end_with_parent()
    Path(sys.argv[1]).touch()
    while True:
        time.sleep(1)

other = get_context("fork").Process(target=wait_for_ever, daemon=True)
other.start()
other.join()
"""


def random_rows(folder: Path, count: int, seed: int = 0) -> np.ndarray:
    """Random rows of a store, of texts of different lengths."""
    generator, store = np.random.default_rng(seed), ConversationStore(folder, 24)
    for number in range(count):
        tokens = generator.integers(0, VOCAB, 4 + number % 20).tolist()
        answers = [i >= 3 for i in range(len(tokens))]
        store.append(Conversation(number, 0.7, tokens, answers))
    return store.rows(range(count))


def overlap_by_definition(target: Decoder, draft: Decoder, rows_Z: np.ndarray) -> float:
    found = []
    for row in rows_Z:
        tokens_L = torch.tensor(row["tokens"][: row["length"]].astype(np.int64))
        p_LV, q_LV = (dense_logits(model, tokens_L).softmax(-1) for model in (target, draft))
        found += torch.minimum(p_LV, q_LV).sum(-1)[2:-1].tolist()
    return float(np.mean(found))


@pytest.mark.parametrize("loss", ["tv", "chi2", "kl"])
def test_the_overlap_rises_as_computed(tmp_path, loss):
    """The overlap of training steps and the measured one equal the definition; training raises the overlap."""
    target, rows = tiny_target(), random_rows(tmp_path, 8)
    draft = student(target)
    trainer = Trainer(
        target, draft, VOCAB, 24, TrainingSettings(loss, batch=8, optimizer=replace(AT_ONCE, peak_rate=1e-2)), Ranks()
    )
    held_out = HeldOut(rows, (1.0,), contexts=8, seed=0)
    when = {"seconds": 0.0, "step": 0, "trained_tokens": 0, "written_tokens": 0}
    overlaps = []
    for steps in (0, 15):
        for step in range(steps):
            trainer.step(rows, step, step / steps)
        result = trainer.gradients(rows, 0.5)
        with torch.no_grad():
            expected = overlap_by_definition(target, draft, rows)
        measured = held_out.measure(target, draft, VOCAB, None, **when)
        assert result.overlap.item() / result.tokens == pytest.approx(expected, rel=1e-4)
        assert measured.overlap == pytest.approx(expected, rel=1e-4)
        assert measured.positions == result.tokens == int(rows["is_answer"].sum())
        overlaps.append(expected)
    assert overlaps[1] > overlaps[0] + 0.05


def test_a_perfect_draft_holds_every_token(tmp_path):
    """If the draft is the target itself, a tree of one row, coupled to the target's draws, holds all of them."""
    target = tiny_target()
    held_out = HeldOut(random_rows(tmp_path, 8), (1.0, 0.7), contexts=16, seed=0)
    found = held_out.measure(target, target, VOCAB, None, seconds=0.0, step=0, trained_tokens=0, written_tokens=0)
    assert found.overlap == pytest.approx(1) and found.kl == pytest.approx(0, abs=1e-6)
    assert found.same_likeliest == 1
    assert found.tree(1.0, 1).held == found.tree(0.7, 1).held == 5


@pytest.mark.slow
def test_two_processes_have_the_gradients_of_one(tmp_path):
    """The gradients are compared after a step of the optimiser."""
    rows, spawn = random_rows(tmp_path / "rows", 10), get_context("spawn")
    gradients(0, 1, tmp_path, rows)
    other = spawn.Process(target=gradients, args=(1, 2, tmp_path, rows))
    other.start()
    gradients(0, 2, tmp_path, rows)
    other.join(timeout=120)
    assert other.exitcode == 0
    (one, tokens), (two, tokens_of_two) = (torch.load(tmp_path / f"gradients-{count}.pt") for count in (1, 2))
    assert tokens == tokens_of_two and len(one) == len(two)
    largest = max(each.abs().max().item() for each in one)
    assert largest > 0
    assert max((a - b).abs().max().item() for a, b in zip(one, two)) < 1e-5 * largest


@pytest.mark.slow
def test_a_killed_run_of_two_processes_goes_on_with_the_same_bits(tmp_path, smcserve):
    """The first process is killed with signal 9 in its second round. The other one ends as well, and the resumed run
    gives the same bits. Other commands accept the draft."""
    save_tiny(tmp_path / "target", rope_scaling=None)
    save_byte_level(tmp_path / "target")
    whole, killed = (replace(config_of(tmp_path, out), processes=2, tokens=4000) for out in ("whole", "killed"))
    # Times change nothing but the card.
    killed = replace(killed, times_models=False)
    run_distill(whole)
    others, deadline = kill_after_a_round(killed), time.monotonic() + 100
    assert _steps(killed.out) < _steps(whole.out)
    while any(Path(f"/proc/{pid}").exists() for pid in others) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert time.monotonic() < deadline and others
    with pytest.raises(ValueError, match="--resume"):
        run_distill(killed)
    with pytest.raises(ValueError, match="held_out=5, but the run"):
        run_distill(replace(killed, held_out=5, resume=True))
    with pytest.raises(ValueError, match="the prompts are not those"):
        run_distill(replace(killed, prompts=((5, 6, 7), (8, 10)), resume=True))
    # The log of prompts has grown since.
    run_distill(replace(killed, prompts=(*killed.prompts, (3, 4)), resume=True))
    ours, theirs = (load_file(config.out / "model.safetensors") for config in (killed, whole))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert _steps(killed.out) == _steps(whole.out)
    for rank in ("1", "0"):
        stores = [ConversationStore(config.work / "data" / rank, config.talk.width) for config in (killed, whole)]
        a, b = (store.rows(range(len(store))) for store in stores)
        assert np.array_equal(a, b) and len(a) >= 64
    # The counts are those of the first process.
    size = Tokenizer.load(whole.out).size
    expected_V = np.zeros(size, dtype=np.int64)
    for row in b:
        np.add.at(expected_V, row["tokens"][row["is_answer"]], 1)
    assert all(np.array_equal(load_counts(config.out, size), expected_V) for config in (whole, killed))
    card = (whole.out / "README.md").read_text()
    assert "total variation" in card and "| temperature | rows |" in card and "layers" in card
    assert smcserve("check", "--target", whole.target, "--draft", whole.out).code == 0
    drafted = ("--raw", "--draft-vocab", 40, "--method", "exact", "--max-tokens", 8, "--seed", 1)
    assert smcserve("generate", "--target", whole.target, "--draft", whole.out, *drafted, "fox").code == 0


@pytest.mark.slow
def test_other_processes_end_with_the_first(tmp_path):
    """A process that is busy writing conversations does not notice that the first one was killed, and would write to
    the files of the resumed run."""
    process = subprocess.Popen([sys.executable, "-c", WAITING, tmp_path / "started"])
    deadline = time.monotonic() + 100
    while not (tmp_path / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    (other,) = children(process.pid)
    process.kill()
    process.wait()
    while Path(f"/proc/{other}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert time.monotonic() < deadline


@pytest.fixture(scope="module")
def byte_target(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("target") / "target"
    save_tiny(folder, rope_scaling=None)
    return save_byte_level(folder)


def test_models_are_not_replaced(tmp_path, byte_target):
    """`--out` may be neither the target's directory nor that of another model."""
    before = (byte_target / "model.safetensors").read_bytes()
    for options in ({}, {"student": StudentSpec(draft=byte_target)}):
        config = replace(config_of(byte_target.parent, byte_target.name), **options)
        with pytest.raises(ValueError, match="holds a model, which the draft would replace; give another --out"):
            distill(config, lambda line: None)
    assert (byte_target / "model.safetensors").read_bytes() == before and not (byte_target / ".distill").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"student": StudentSpec(layers=9)}, "--layers 9; allowed for this target: at most 2"),
        ({"student": StudentSpec(shape="9x2")}, "--shape 9x2; the width must be a multiple"),
        ({"talk": TalkSettings(width=4096)}, "width=4096; the models have contexts of 256"),
        ({"prompts": ((1,) * 40,)}, "prompts of 44 tokens"),
    ],
)
def test_a_run_that_cannot_begin_leaves_its_directory_free(tmp_path, byte_target, options, message):
    config = config_of(byte_target.parent, "draft")
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            distill(replace(config, out=tmp_path / "draft", **options), lambda line: None)


def test_a_draft_of_another_vocabulary_is_refused(tmp_path, byte_target):
    """The vocabulary is checked before anything is written."""
    draft = save_tiny(tmp_path / "other", vocab_size=400)
    save_sentencepiece(draft)
    config = replace(config_of(byte_target.parent, "draft"), out=tmp_path / "draft", student=StudentSpec(draft=draft))
    with pytest.raises(ValueError, match="different vocabularies"):
        distill(config, lambda line: None)
    assert not (tmp_path / "draft").exists()


@pytest.mark.slow
def test_weights_that_are_not_finite_end_the_run(tmp_path, byte_target):
    """Such weights are not saved, because no command would accept the draft."""
    config = replace(config_of(byte_target.parent, "draft"), out=tmp_path / "draft")
    config = replace(
        config, training=replace(config.training, optimizer=replace(AT_ONCE, peak_rate=1e30)), times_models=False
    )
    with pytest.raises(ValueError, match=r"not finite; start again in another --out with a lower --rate than 1e\+30"):
        distill(config, lambda line: None)
    assert not (tmp_path / "draft" / "config.json").exists()


@pytest.mark.slow
def test_a_run_without_time_to_learn_says_so(tmp_path, byte_target):
    lines: list[str] = []
    config = replace(
        config_of(byte_target.parent, "draft"), out=tmp_path / "draft", tokens=None, minutes=1e-4, times_models=False
    )
    found = distill(config, lines.append)
    assert found.step == 0 and "the draft was not trained; give more --minutes" in lines[-1]


def test_layers_are_chosen_by_answers(tmp_path):
    """Layers are chosen by the divergence over the answers of whole conversations, even if one conversation is
    short."""
    target, rows = tiny_target(), random_rows(tmp_path, 12)
    rows["tokens"][0, :4] = 1

    def kl(layers: tuple[int, ...]) -> float:
        model, found = cut(target, layers), []
        for row in rows:
            tokens_L = torch.tensor(row["tokens"][: row["length"]].astype(np.int64))
            logp_LV, logq_LV = (dense_logits(each, tokens_L).log_softmax(-1) for each in (target, model))
            found += (logp_LV.exp() * (logp_LV - logq_LV)).sum(-1)[2:-1].tolist()
        return float(np.mean(found))

    for count in (1, 2):
        with torch.no_grad():
            expected = min(candidate_layers(3, count), key=kl)
        assert choose_layers(target, StudentSpec(layers=count), rows, VOCAB) == expected


def test_texts_that_fill_the_context_are_measured(tmp_path):
    """After the last contexts there is no room for the tokens that the target draws."""
    config = replace(CONFIG, max_context=24)
    target = random_decoder(config, seed=5)
    rows = random_rows(tmp_path, 20)
    held_out = HeldOut(rows, (1.0,), contexts=400, seed=0)
    found = held_out.measure(target, target, VOCAB, None, seconds=0.0, step=0, trained_tokens=0, written_tokens=0)
    assert rows["length"].max() > 24 - 4 and found.tree(1.0, 1).held == 5


def _steps(folder: Path) -> int:
    return json.loads((folder / "distill.json").read_text())["history"][-1]["step"]


@pytest.mark.parametrize(
    "family", ["llama-linear", "mistral-window", "phi3-window", "phi3-longrope", "smollm3", "gemma3", "qwen3_moe"]
)
def test_drafts_of_all_families_are_read_again(tmp_path, family):
    """A draft keeps the windows and rotations of the target's layers that it consists of."""
    save_hf(family, tmp_path / "target")
    save_byte_level(tmp_path / "target")
    target = load_model(tmp_path / "target").bfloat16().float()  # drafts are saved in bfloat16
    made = make_student(target, tmp_path / "target", StudentSpec(layers=2), (1, 2))
    save_student(made, tmp_path / "target", tmp_path / "draft")
    tokens = torch.arange(30)
    with torch.no_grad():
        found, expected = (
            dense_logits(model, tokens) for model in (load_model(tmp_path / "draft"), cut(target, (1, 2)))
        )
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def test_a_draft_gets_the_target_s_tokens(tmp_path):
    """A draft that lacks ids of the target has rows for them when it is trained further, and the target's tokenizer
    when it is saved."""
    target, draft = save_foreign_pair(tmp_path)
    assert require_pair(target, draft).foreign
    save_student(make_student(load_model(target), target, StudentSpec(draft=draft)), target, tmp_path / "out")
    assert not require_pair(target, tmp_path / "out").foreign
    assert load_model(tmp_path / "out").config.vocab_size == FOREIGN_VOCAB


def test_a_full_disk_leaves_the_files_before(tmp_path):
    """The error names the file, earlier files stay intact, and temporary files are removed, so that another attempt has
    room."""
    store, target = ConversationStore(tmp_path / "data", 24), tiny_target()
    store.append(Conversation(0, 0.7, (1, 2, 3), (False, True, True)))
    store.flush()
    replace_file(tmp_path / "checkpoint.pt", lambda opened: torch.save({"step": 1}, opened))
    save_model(target, tmp_path / "draft")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    for number in range(1, 64):
        store.append(Conversation(number, 0.7, (1, 2, 3), (False, True, True)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match=r"000000.npy cannot be written .*; make room on the disk"):
            store.flush()
        with pytest.raises(OSError, match=r"checkpoint.pt cannot be written .*; make room on the disk"):
            replace_file(tmp_path / "checkpoint.pt", lambda opened: torch.save({"step": torch.zeros(4096)}, opened))
        with pytest.raises(OSError, match=r"model.safetensors cannot be written"):
            save_model(target, tmp_path / "draft")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    store.flush()
    assert len(ConversationStore(tmp_path / "data", 24)) == 64


def test_layers_to_choose_from():
    assert (0, 10, 19, 29) in candidate_layers(30, 4) and (0, 1, 28, 29) in candidate_layers(30, 4)
    assert candidate_layers(2, 2) == [(0, 1)]
    with pytest.raises(ValueError, match="at most 8"):
        candidate_layers(8, 9)
    with pytest.raises(ValueError, match="exclude"):
        StudentSpec(layers=2, shape="64x2")
    with pytest.raises(ValueError, match="WIDTHxLAYERS"):
        StudentSpec(shape="64")


def test_a_new_shape_learns_its_own_embedding(tmp_path):
    save_model(target := tiny_target(), tmp_path)
    made = make_student(target, tmp_path, StudentSpec(shape="16x2"))
    assert made.model.config == replace(made.model.config, hidden_size=16, num_layers=2)
    assert made.model.embed.weight.requires_grad and made.model.lm_head.weight is made.model.embed.weight
    rows = random_rows(tmp_path / "rows", 8)
    trainer = Trainer(target, made.model, VOCAB, 24, TrainingSettings(batch=8, optimizer=AT_ONCE), Ranks())
    before = made.model.embed.weight.detach().clone()
    first, last = (trainer.step(rows, step, 0.1).overlap.item() for step in range(2))
    assert last > first and not torch.equal(before, made.model.embed.weight)


def test_measuring_does_not_take_the_time_to_learn():
    assert seconds_of_round(800.0, 8, 0.0) == 100.0
    assert seconds_of_round(700.0, 7, 5.0) == 95.0
    # Observed on a GPU: measuring took 58 s, more than a seventh of the time left, and training stopped.
    assert seconds_of_round(172.0, 7, 58.0) == 114.0
    assert seconds_of_round(20.0, 3, 58.0) == 0.0
    for left in (50.0, 200.0, 1000.0):
        rounds = left / (seconds_of_round(left, 8, 10.0) + 10.0)
        assert rounds * 10.0 <= 0.2 * left + 1e-6 or rounds == 1
