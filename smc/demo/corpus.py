"""Training problems as one long run of tokens, and batches cut from it. Knows nothing about models.

Problems are sorted by length and cut into groups of equal size; a batch takes equally many from every group, so each
group pads to its own width only and every batch still has the corpus's mix of lengths.

Axes: L tokens of the whole corpus, N problems, B problems of one batch, S token positions.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from smc.demo.problems import generate
from smc.demo.tokenizer import ASSISTANT, EOS, build, render

TOKENIZER_SEED = 1_000_000
TOKENIZER_PROBLEMS = 20_000
FIRST_SEED = 0
"""Chunk i of the corpus is made from seed FIRST_SEED + i."""
CHUNK = 4_000
"""Problems a worker makes at a time."""
GROUPS = 3
IGNORED = -100
"""Label of a position whose next token is not part of an answer."""


def learn_tokenizer() -> Tokenizer:
    """The tokenizer of both demo models, learned from training problems of a seed of its own."""
    problems = generate(TOKENIZER_SEED, TOKENIZER_PROBLEMS, "train")
    return build(text for problem in problems for text in (problem.question, problem.solution))


@dataclass(frozen=True)
class TrainingBatch:
    tokens_BS: Tensor
    """What follows the end of a problem in its row is arbitrary; no label depends on it."""
    labels_BS: Tensor
    """The next token where it belongs to the answer, else IGNORED."""


@dataclass(frozen=True)
class Corpus:
    flat_L: Tensor
    """All problems, one after the other, int16."""
    start_N: Tensor
    """Where each problem begins in `flat_L`; problems are sorted by length."""
    prompt_N: Tensor
    """Tokens before the answer."""
    length_N: Tensor
    """Tokens in all, the end-of-text token included."""
    widths: tuple[int, ...]
    """Row length S of each group."""

    def __len__(self) -> int:
        return len(self.start_N)

    def to(self, device: str) -> Corpus:
        flat_L, start_N, prompt_N, length_N = (
            t.to(device) for t in (self.flat_L, self.start_N, self.prompt_N, self.length_N)
        )
        return Corpus(flat_L, start_N, prompt_N, length_N, self.widths)

    def sample(self, size: int, generator: torch.Generator) -> Iterator[TrainingBatch]:
        """One batch of `size` problems, as one part per group."""
        bounds = _bounds(len(self))
        for width, low, high in zip(self.widths, bounds, bounds[1:]):
            yield self._cut(
                torch.randint(low, high, (size // GROUPS,), generator=generator, device=self.flat_L.device), width
            )

    def _cut(self, chosen_B: Tensor, width: int) -> TrainingBatch:
        place_S = torch.arange(width, device=self.flat_L.device)
        at_BS = self.start_N[chosen_B, None] + place_S
        answers_BS = (place_S >= self.prompt_N[chosen_B, None] - 1) & (place_S < self.length_N[chosen_B, None] - 1)
        labels_BS = torch.where(answers_BS, self.flat_L[at_BS + 1].long(), IGNORED)
        return TrainingBatch(self.flat_L[at_BS].long(), labels_BS)


def make(tokenizer: Tokenizer, count: int, workers: int) -> Corpus:
    """Generate and encode `count` training problems in `workers` processes."""
    jobs = [(FIRST_SEED + i, min(CHUNK, count - i * CHUNK)) for i in range(-(-count // CHUNK))]
    # Spawned, because forking a process whose libraries have started threads can hang.
    with multiprocessing.get_context("spawn").Pool(workers, _start_worker, (tokenizer.to_str(),)) as pool:
        parts = pool.starmap(_encode_chunk, jobs)
    flat, prompt, length = (np.concatenate(column) for column in zip(*parts))
    start = np.cumsum(length) - length
    order = np.argsort(length, kind="stable")
    bounds = _bounds(count)
    # A row never feeds its last token, and multiples of 8 suit the matrix units.
    widths = tuple(-(-(int(length[order[high - 1]]) - 1) // 8) * 8 for high in bounds[1:])
    flat = np.concatenate((flat, np.zeros(max(widths) + 1, np.int16)))  # the last rows are cut past the last problem
    start_N, prompt_N, length_N = (torch.from_numpy(column[order]) for column in (start, prompt, length))
    return Corpus(torch.from_numpy(flat), start_N, prompt_N, length_N, widths)


def _bounds(count: int) -> list[int]:
    return [group * count // GROUPS for group in range(GROUPS + 1)]


_worker_tokenizer: Tokenizer
"""Of a process that encodes."""


def _start_worker(tokenizer_json: str) -> None:
    global _worker_tokenizer
    _worker_tokenizer = Tokenizer.from_str(tokenizer_json)


def _encode_chunk(seed: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens of all problems of one chunk, and the prompt and total length of each."""
    answer_mark = _worker_tokenizer.token_to_id(ASSISTANT)
    assert answer_mark is not None, "a token of its own"
    rows = [_worker_tokenizer.encode(render(p.question) + p.solution + EOS).ids for p in generate(seed, count, "train")]
    flat = np.array([token for row in rows for token in row], np.int16)
    return flat, np.array([row.index(answer_mark) + 1 for row in rows]), np.array([len(row) for row in rows])
