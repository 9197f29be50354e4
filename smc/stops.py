"""The conditions that end an answer: stop tokens, and stop strings as a machine over bytes that enters `DONE` when one
of them is complete.

The machine is that of Aho and Corasick (Communications of the ACM 18, 1975). It reads the bytes of tokens, which are
stored once per vocabulary, so the cost of a request does not depend on the size of the vocabulary. Knows nothing about
slots, rounds or requests.

Local axes: P bytes (256 values, or all bytes of a vocabulary), Y states, Z entries of the tables (stop machines)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from smc.api.constraint import Constraint
from smc.api.limits import MAX_STOP_BYTES
from smc.arrays import to_device
from smc.model.tokenizer import Tokenizer

START, DONE = 0, 1
MAX_STATES = 1024
ENDS, ENDS_EARLY = 1, 2
"""How a token ends answers in the stop tables: where they may end, or everywhere."""


@dataclass(frozen=True, eq=False)
class TokenBytes:
    """The bytes of all tokens of a vocabulary, concatenated."""

    data_P: np.ndarray
    """Bytes, uint8."""
    offset_V: np.ndarray
    """Offset of each token's bytes, and the end of the last one's, int32 [V + 1]."""
    eos_ids: tuple[int, ...] = ()
    """Tokens that end texts."""

    @staticmethod
    @lru_cache(maxsize=4)
    def of(tokenizer: Tokenizer) -> TokenBytes:
        tokens = [tokenizer.bytes_of(token) for token in range(tokenizer.size)]
        offset_V = np.zeros(len(tokens) + 1, dtype=np.int32)
        np.cumsum(np.fromiter(map(len, tokens), np.int32, len(tokens)), out=offset_V[1:])
        return TokenBytes(np.frombuffer(b"".join(tokens), dtype=np.uint8).copy(), offset_V, tokenizer.eos_ids)

    def to(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Copy to a device: (data [P], offset [V + 1])."""
        return to_device(self.data_P, device), to_device(self.offset_V, device)


@dataclass(frozen=True)
class StopMachine:
    """The conditions that end the answers of a request, with its changes of logits. Machines are equal if they were
    made from equal arguments, whatever the order of stop tokens, strings and bad words."""

    stop_ids: tuple[int, ...]
    """Stop tokens, ascending."""
    strings: tuple[bytes, ...]
    """Stop strings, ascending."""
    biases: tuple[tuple[int, float], ...] = ()
    """Numbers added to logits: pairs of token and number, ascending. They are part of the machine because the models
    store them with it."""
    constraint: Constraint | None = None
    """The constraint on the answer."""
    bad_words: tuple[bytes, ...] = ()
    """Texts that the answer must not contain, ascending."""
    early_ids: tuple[int, ...] = ()
    """Stop tokens that end the answer even before `min_tokens`, ascending: those that end texts, if there is a
    constraint. They are drawn that early only if the constraint allows nothing else."""
    next_YP: np.ndarray | None = field(init=False, compare=False, repr=False)
    """State after a byte, int16 [Y, 256]; None without strings."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "next_YP", byte_machine(self.strings) if self.strings else None)

    @staticmethod
    def of(
        stop_ids: Iterable[int],
        strings: Sequence[bytes],
        biases: tuple[tuple[int, float], ...] = (),
        constraint: Constraint | None = None,
        bad_words: Iterable[bytes] = (),
        early_ids: Iterable[int] = (),
    ) -> StopMachine:
        """Make a machine. `strings` must not be empty. Raises ValueError if they are longer than `MAX_STOP_BYTES`
        together."""
        if (size := sum(map(len, strings))) > MAX_STOP_BYTES:
            raise ValueError(f"stop has strings of {size} bytes together; allowed: at most {MAX_STOP_BYTES}")
        return StopMachine(
            tuple(sorted(set(stop_ids))),
            tuple(sorted(set(strings))),
            biases,
            constraint,
            tuple(sorted(set(bad_words))),
            tuple(sorted(set(early_ids))),
        )

    @property
    def key(self) -> tuple[Any, ...]:
        """Arguments that the machine was made from: `StopMachine.of(*key)` is equal to it."""
        return self.stop_ids, self.strings, self.biases, self.constraint, self.bad_words, self.early_ids

    @property
    def masks(self) -> bool:
        """Whether the tokens so far decide which tokens may follow."""
        return self.constraint is not None or bool(self.bad_words)


def byte_machine(strings: Sequence[bytes]) -> np.ndarray:
    """Next state, int16 [Y, 256]: `START` and `DONE`, then a state for every proper prefix of a string."""
    children = _trie(strings)
    next_YP = np.zeros((len(children), 256), dtype=np.int16)
    next_YP[DONE] = DONE
    # Breadth first: the row of a shorter text is complete before a longer one falls back on it.
    queue = deque([(START, START)])
    while queue:
        state, shorter = queue.popleft()
        row_P = next_YP[state]
        row_P[:] = next_YP[shorter]
        for byte, child in children[state].items():
            # A shorter string that is complete ends the answer, so longer ones are never reached.
            if (fallback := int(row_P[byte])) == DONE:
                continue
            row_P[byte] = child
            if child != DONE:
                queue.append((child, fallback))
    return next_YP


def _trie(strings: Sequence[bytes]) -> list[dict[int, int]]:
    """Children of each state by byte; every string ends in `DONE`. `strings` are sorted, so a string precedes those
    that begin with it."""
    children: list[dict[int, int]] = [{}, {}]
    for string in strings:
        state = START
        for byte in string[:-1]:
            if byte not in children[state]:
                children[state][byte] = len(children)
                children.append({})
            state = children[state][byte]
            if state == DONE:
                break
        else:
            children[state][string[-1]] = DONE
    return children


class StopTables(NamedTuple):
    """Stop machines on a device, by entry. Entry 0 is for answers that only their length ends."""

    is_stop_ZV: Tensor
    """uint8: whether and how the token ends answers: 0, `ENDS` or `ENDS_EARLY`."""
    vocab: int
    """Number of tokens that a model can draw."""
    has_strings_Z: Tensor
    """bool: the machine has stop strings."""
    next_ZYP: Tensor
    """int16 [E, MAX_STATES, 256] state after a byte."""
    data_P: Tensor
    """uint8 bytes of all tokens."""
    offset_V: Tensor
    """int32 [spelled + 1] offset of each token's bytes, and the end of the last one's."""
    spelled: int
    """Number of tokens whose bytes are listed: more or fewer than a model can draw."""

    @staticmethod
    def allocate(entries: int, vocab: int, token_bytes: TokenBytes, device: torch.device) -> StopTables:
        data_P, offset_V = token_bytes.to(device)
        shape = (entries, MAX_STATES, 256)
        if device.type == "cpu":
            # NumPy's zeros take no memory until they are written, and most requests have no strings.
            next_ZYP = torch.from_numpy(np.zeros(shape, np.int16))
        else:
            next_ZYP = torch.zeros(shape, dtype=torch.int16, device=device)
        return StopTables(
            is_stop_ZV=torch.zeros(entries, vocab, dtype=torch.uint8, device=device),
            vocab=vocab,
            has_strings_Z=torch.zeros(entries, dtype=torch.bool, device=device),
            next_ZYP=next_ZYP,
            data_P=data_P,
            offset_V=offset_V,
            spelled=len(offset_V) - 1,
        )

    def set(self, entry: int, machine: StopMachine) -> None:
        """Set the machine of an entry. Stop tokens outside of the vocabulary are ignored: they are never drawn."""
        assert 0 < entry < len(self.has_strings_Z)
        self.is_stop_ZV[entry].fill_(0)
        device = self.is_stop_ZV.device
        for tokens, kind in ((machine.stop_ids, ENDS), (machine.early_ids, ENDS_EARLY)):
            drawable = [token for token in tokens if token < self.vocab]
            if drawable:
                self.is_stop_ZV[entry].index_fill_(0, to_device(np.array(drawable), device), kind)
        self.has_strings_Z[entry].fill_(machine.next_YP is not None)
        if machine.next_YP is not None:
            # Further states of an earlier machine remain; no state of this machine leads there.
            self.next_ZYP[entry, : len(machine.next_YP)] = to_device(machine.next_YP, device)


@dataclass(frozen=True)
class StopProgress:
    """Result of appending tokens to answers."""

    count_A: Tensor
    """Number of tokens that count, int64: up to the first that ends the answer or fills its room."""
    ends_A: Tensor
    """Whether the last of them ends the answer, bool. True if there is no room."""
    text_A: Tensor
    """State of the machine after them, int64; `DONE` after a stop token, too."""


def grow(
    tables: StopTables,
    entry_A: Tensor,
    text_A: Tensor,
    tokens_AK: Tensor,
    room_A: Tensor,
    early_A: Tensor | None = None,
) -> StopProgress:
    """Append tokens to answers in state `text_A` with room for `room_A` more tokens. The first `early_A` of them cannot
    end the answer (None: all can), except tokens that are `ENDS_EARLY`. All arguments are integers. An unknown id has
    no bytes and ends nothing, and an answer in `DONE` ends with any token. Reference for
    `smc.kernels.stops.after_all`, which does the same within kernels."""
    k = tokens_AK.shape[1]
    entry_A = entry_A.long()
    states = [text_A.long()]
    for index, token_A in enumerate(tokens_AK.long().unbind(1)):
        after_A = _after(tables, entry_A, states[-1], token_A)
        if early_A is not None:
            goes_on_A = (index < early_A) & (_stops(tables, entry_A, token_A) != ENDS_EARLY)
            after_A = torch.where((after_A == DONE) & goes_on_A, START, after_A)
        states.append(after_A)
    text_AK = torch.stack(states, 1)
    index_K = torch.arange(1, k + 1, device=text_A.device)
    first_A = torch.where(text_AK[:, 1:] == DONE, index_K, k + 1).amin(-1)
    count_A = torch.minimum(first_A, room_A).clamp(0, k)
    return StopProgress(count_A, (first_A <= count_A) | (count_A >= room_A), text_AK.gather(1, count_A[:, None])[:, 0])


def _stops(tables: StopTables, entry_A: Tensor, token_A: Tensor) -> Tensor:
    """Whether and how tokens end answers: 0, `ENDS` or `ENDS_EARLY`."""
    vocab = tables.is_stop_ZV.shape[1]
    drawable_A = (token_A >= 0) & (token_A < vocab)
    return tables.is_stop_ZV[entry_A, token_A.clamp(0, vocab - 1)] * drawable_A


def _after(tables: StopTables, entry_A: Tensor, text_A: Tensor, token_A: Tensor) -> Tensor:
    """States after one token each."""
    vocab = tables.vocab
    drawable_A = (token_A >= 0) & (token_A < vocab)
    text_A = torch.where(_stops(tables, entry_A, token_A) > 0, DONE, text_A)
    if not tables.has_strings_Z.any():
        return text_A
    last = tables.spelled - 1
    known_A = tables.has_strings_Z[entry_A] & drawable_A & (token_A <= last)
    index_A = token_A.clamp(0, last)
    begin_A = tables.offset_V[index_A].long()
    size_A = torch.where(known_A, tables.offset_V[index_A + 1] - begin_A, 0)
    for offset in range(int(size_A.max()) if len(size_A) else 0):
        reading_A = offset < size_A
        byte_A = tables.data_P[torch.where(reading_A, begin_A + offset, 0)].long()
        text_A = torch.where(reading_A, tables.next_ZYP[entry_A, text_A, byte_A].long(), text_A)
    return text_A
