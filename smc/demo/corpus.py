"""The demo models' tokenizer and training corpus: all problems as one sequence of tokens, and batches sampled from it.
Knows nothing about models.

The tokenizer is byte-level BPE with one token per digit, so each number has exactly one encoding. Any text encodes and
decodes exactly, byte by byte if necessary.

Problems are sorted by length and split into groups of equal size. A batch takes the same number from every group, so
each group is padded only to its own width and every batch has the corpus's mix of lengths.

Local axes: Z problems."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from smc.demo.problems import generate
from smc.model.files import write_json

BOS, EOS, USER, ASSISTANT = SPECIALS = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>")
"""Special tokens, with ids 0 to 3."""
VOCAB_SIZE = 512

CHAT_TEMPLATE = (
    "<|bos|>{% for message in messages %}"
    "{% if message['role'] == 'user' %}<|user|>{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|eos|>"
    "{% else %}{{ raise_exception('the demo models know the roles user and assistant only') }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOKENIZER_SEED = 1_000_000
TOKENIZER_PROBLEMS = 20_000
FIRST_SEED = 0
"""Chunk i of the corpus is generated from seed FIRST_SEED + i."""
CHUNK = 4_000
"""Number of problems that a worker generates at a time."""
GROUPS = 3
"""Number of groups of similar length."""
IGNORED = -100
"""Label of positions whose next token is not part of an answer."""
_worker_tokenizer: Tokenizer
"""Tokenizer of this worker process."""


def render(question: str) -> str:
    """Return the prompt of a question, as the chat template renders it."""
    return f"{BOS}{USER}{question}{ASSISTANT}"


def build(texts: Iterable[str]) -> Tokenizer:
    """Train the merges on `texts`. Deterministic. Raises ValueError if the texts give fewer than VOCAB_SIZE tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d"), behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(
            f"the texts give {tokenizer.get_vocab_size()} tokens, {VOCAB_SIZE} are needed; give more varied texts"
        )
    return tokenizer


def write(tokenizer: Tokenizer, directory: Path, max_context: int) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` (with the chat template) and `generation_config.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = {"bos_token_id": tokenizer.token_to_id(BOS), "eos_token_id": tokenizer.token_to_id(EOS)}
    write_json(directory / "generation_config.json", ids | {"pad_token_id": ids["eos_token_id"]})
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_context,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(directory / "tokenizer_config.json", config)


def learn_tokenizer() -> Tokenizer:
    """Train the tokenizer of both demo models, on training problems with a seed of their own."""
    problems = generate(TOKENIZER_SEED, TOKENIZER_PROBLEMS, "train")
    return build(text for problem in problems for text in (problem.question, problem.solution))


@dataclass(frozen=True)
class TrainingBatch:
    """Problems of one length group, one in each row."""

    tokens_RL: Tensor
    """Tokens of each problem. Tokens after its end are arbitrary, and no label depends on them."""
    labels_RL: Tensor
    """The next token if it is part of the answer, otherwise IGNORED."""


@dataclass(frozen=True)
class Corpus:
    """Encoded training problems, sorted by length."""

    flat_L: Tensor
    """Tokens of all problems, one after another, int16."""
    start_Z: Tensor
    """Index in `flat_L` of each problem's first token."""
    prompt_Z: Tensor
    """Number of tokens of each prompt."""
    length_Z: Tensor
    """Number of tokens of each problem, including the end-of-text token."""
    widths: tuple[int, ...]
    """Row length L of each group."""

    def __len__(self) -> int:
        return len(self.start_Z)

    def to(self, device: str) -> Corpus:
        flat_L, start_Z, prompt_Z, length_Z = (
            t.to(device) for t in (self.flat_L, self.start_Z, self.prompt_Z, self.length_Z)
        )
        return Corpus(flat_L, start_Z, prompt_Z, length_Z, self.widths)

    def sample(self, size: int, generator: torch.Generator) -> Iterator[TrainingBatch]:
        """Sample one batch of `size` problems, one part per group."""
        bounds = _bounds(len(self))
        for width, low, high in zip(self.widths, bounds, bounds[1:]):
            yield self._part(
                torch.randint(low, high, (size // GROUPS,), generator=generator, device=self.flat_L.device), width
            )

    def _part(self, chosen_R: Tensor, width: int) -> TrainingBatch:
        position_L = torch.arange(width, device=self.flat_L.device)
        at_RL = self.start_Z[chosen_R, None] + position_L
        answers_RL = (position_L >= self.prompt_Z[chosen_R, None] - 1) & (
            position_L < self.length_Z[chosen_R, None] - 1
        )
        labels_RL = torch.where(answers_RL, self.flat_L[at_RL + 1].long(), IGNORED)
        return TrainingBatch(self.flat_L[at_RL].long(), labels_RL)


def make_corpus(tokenizer: Tokenizer, count: int, workers: int) -> Corpus:
    """Generate and encode `count` training problems in `workers` processes."""
    jobs = [(FIRST_SEED + i, min(CHUNK, count - i * CHUNK)) for i in range(-(-count // CHUNK))]
    # "spawn", because forking a process that has threads can deadlock.
    with multiprocessing.get_context("spawn").Pool(workers, _start_worker, (tokenizer.to_str(),)) as pool:
        parts = pool.starmap(_encode_chunk, jobs)
    flat, prompt, length = (np.concatenate(column) for column in zip(*parts))
    start = np.cumsum(length) - length
    order = np.argsort(length, kind="stable")
    bounds = _bounds(count)
    # The last token of a row is never an input. Tensor cores need multiples of 8.
    widths = tuple(-(-(int(length[order[high - 1]]) - 1) // 8) * 8 for high in bounds[1:])
    flat = np.concatenate((flat, np.zeros(max(widths) + 1, np.int16)))  # rows of the last problems extend past its end
    start_Z, prompt_Z, length_Z = (torch.from_numpy(column[order]) for column in (start, prompt, length))
    return Corpus(torch.from_numpy(flat), start_Z, prompt_Z, length_Z, widths)


def _bounds(count: int) -> list[int]:
    return [group * count // GROUPS for group in range(GROUPS + 1)]


def _start_worker(tokenizer_json: str) -> None:
    global _worker_tokenizer
    _worker_tokenizer = Tokenizer.from_str(tokenizer_json)


def _encode_chunk(seed: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Encode one chunk. Returns the tokens of all its problems, and the prompt length and total length of each
    problem."""
    answer_mark = _worker_tokenizer.token_to_id(ASSISTANT)
    assert answer_mark is not None, "the tokenizer has no token for the assistant's turn"
    rows = [_worker_tokenizer.encode(render(p.question) + p.solution + EOS).ids for p in generate(seed, count, "train")]
    flat = np.array([token for row in rows for token in row], np.int16)
    return flat, np.array([row.index(answer_mark) + 1 for row in rows]), np.array([len(row) for row in rows])
