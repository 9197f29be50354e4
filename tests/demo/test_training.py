"""The parts of demo training that can be checked without training: batches, recipes, intervals, sampling."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from smc.demo import corpus, train
from smc.demo.problems import generate
from smc.demo.train import TARGET_CONFIG
from smc.model.decoder import RopeTable
from smc.model.loader import initial_model
from smc.training import OptimizerSettings

# What they learn from is made once, and torch's compiler is imported once, by the optimisers and by transformers.
pytestmark = pytest.mark.xdist_group("transformers")
TINY = replace(
    TARGET_CONFIG, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=16
)
OPTIMIZER = OptimizerSettings(peak_rate=1e-2, warmup=1, weight_decay=0.1)
RECIPE = train.Recipe(TINY, seed=1, batch=6, steps=3, minutes=None, optimizer=OPTIMIZER)


@pytest.fixture(scope="module")
def learned():
    problems = generate(corpus.TOKENIZER_SEED, 300, "train")
    return corpus.build(text for problem in problems for text in (problem.question, problem.solution))


@pytest.fixture(scope="module")
def data(learned):
    return corpus.make_corpus(learned, 60, workers=1)


def test_labels_are_the_solutions(learned, data):
    solutions = {problem.question: problem.solution for problem in generate(corpus.FIRST_SEED, 60, "train")}
    parts = list(data.sample(90, torch.Generator().manual_seed(0)))
    assert [part.tokens_RL.shape for part in parts] == [(30, width) for width in data.widths]
    for part in parts:
        for tokens, labels in zip(part.tokens_RL.tolist(), part.labels_RL.tolist()):
            answer = [label for label in labels if label != corpus.IGNORED]
            begin = labels.index(answer[0])
            question = learned.decode(tokens[2:begin], skip_special_tokens=False)
            assert learned.decode(answer, skip_special_tokens=False) == solutions[question] + corpus.EOS


def test_training_lowers_the_loss_and_repeats(data):
    runs = [train.DemoTrainer(RECIPE, data, "cpu", compile_loss=False) for _ in range(2)]
    before = runs[0].gradients().item()
    runs[0] = train.DemoTrainer(RECIPE, data, "cpu", compile_loss=False)
    assert [run.run() for run in runs] == [3, 3]
    assert all(torch.equal(a, b) for a, b in zip(runs[0].model.parameters(), runs[1].model.parameters()))
    assert runs[0].gradients().item() < before


def test_a_stop_condition_ends_the_run(data):
    assert train.DemoTrainer(RECIPE, data, "cpu", compile_loss=False).run(lambda step, _model: step == 2) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"minutes": 1.0}, "exactly one"), ({"steps": None}, "exactly one"), ({"batch": 7}, "multiple")],
)
def test_wrong_recipes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(RECIPE, **changes)


def test_rate_rises_then_falls_to_zero():
    settings = replace(OPTIMIZER, warmup=10)
    assert settings.rate(0, 0.0) == pytest.approx(settings.peak_rate / 10)
    assert settings.rate(100, 1.0) == pytest.approx(0)
    assert replace(RECIPE, steps=None, minutes=2.0).progress(5, 60.0) == 0.5


def test_samples_end_at_eos_whatever_else_is_in_the_batch(learned):
    """The model nearly always samples the token that it prefers; padding a shorter prompt on the right changes
    nothing."""
    eos = learned.token_to_id(corpus.EOS)
    model = initial_model(TINY, seed=0)
    rope_LD = RopeTable(TINY, TINY.max_context).table
    torch.nn.init.zeros_(model.embed.weight)
    model.embed.weight.data[:, 0] = 1.0
    model.embed.weight.data[eos, 0] = 100.0
    assert train.sample_answers(model, rope_LD, [[5, 6], [7, 8, 9, 10]], eos, seed=0) == [[], []]
    model.embed.weight.data[eos, 0] = 1.0
    model.embed.weight.data[11, 0] = 100.0
    assert train.sample_answers(model, rope_LD, [[5, 6], [7, 8, 9, 10]], eos, seed=0) == [[11] * train.MAX_ANSWER] * 2
