"""Writes conversations with the target and keeps them on disk. A user turn is given, or the target writes it after the
opening of its chat template; the target also writes the answers.

Plain decoding in the project's own engine continues as many conversations at once as there are slots. A conversation
depends only on the seed and its number, so a run that was killed writes the same ones again.

Conversations that teach nothing are dropped: those whose first user turn does not end, is too long or contains special
tokens, and those whose first answer repeats itself or is nearly empty. An answer that is cut at its maximum length is
kept: every served answer passes through such prefixes.

On disk, conversations are rows of equal width in numbered files that are mapped into memory (`ConversationStore`).
Memory does not grow with the number of rows: a full file is written once, and its rows are read from the mapped file.
The rows after the last full file are in memory, and in a file that is replaced at every flush.

Local axes: Z conversations."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np

from smc.api.engine_config import EngineConfig
from smc.api.request import Answer, Request
from smc.api.sampling_params import Method, SamplingParams
from smc.local_engine import ModelPair, local_engine
from smc.model.tokenizer import Tokenizer

ROWS_PER_FILE = 1024
OPEN_FILES = 64
"""Maximum number of files that are mapped at the same time."""
logger = logging.getLogger(__name__)
PROBE = "x"
"""Content of messages that are rendered to find where a template puts texts."""
LEAST_ANSWER = 4
"""Minimum number of tokens of an answer that is kept."""
GRAM = 4
"""Number of consecutive tokens that are compared to find repetition."""
MOST_REPEATED = 0.5
"""Maximum share of an answer's 4-grams that have occurred before in it."""
MOST_DROPPED = 300
"""Writing fails if this many conversations are dropped before the first one is kept."""
TEMPERATURES = (1.0, 0.7, 1.0, 0.7, 0.0)
USER_TEMPERATURE = 0.7
"""Maximum temperature of user turns. At temperature 1, those of small models drift to text about which every model is
uncertain."""


def replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file as a whole: if the process is killed meanwhile, the previous file remains. Raises OSError if it
    cannot be written, such as on a full disk; the previous file remains then, too."""
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("wb") as opened:
            write(opened)
            opened.flush()
            os.fsync(opened.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError
        temporary.unlink(missing_ok=True)
        raise OSError(
            f"{path} cannot be written ({error}); make room on the disk and continue with --resume"
        ) from error


@dataclass
class Conversation:
    """A conversation that the target writes."""

    number: int
    """Index among all conversations of a run. The seed and this number decide everything in the conversation."""
    temperature: float
    """Sampling temperature of the answers."""
    tokens: list[int] = field(default_factory=list)
    is_answer: list[bool] = field(default_factory=list)
    """Whether each token is one that the target drew in an answer, end-of-text included."""
    answers: int = 0
    """Number of answers."""
    answering: bool = False
    """Whether the next tokens belong to an answer."""

    def add(self, tokens: Sequence[int], is_answer: bool = False) -> None:
        self.tokens += tokens
        self.is_answer += [is_answer] * len(tokens)


class ConversationStore:
    """Conversations of one process, in the order of their numbers."""

    def __init__(self, directory: Path, width: int) -> None:
        """Open the files in `directory`, if there are any. `width`: L, the maximum number of tokens of a conversation.
        Raises ValueError if their rows have another width."""
        self._directory, self.width = directory, width
        self._dtype = np.dtype(
            [("number", "<i8"), ("temperature", "<f4"), ("length", "<i4"), ("tokens", "<i4", width)]
            + [("is_answer", "?", width)]
        )
        directory.mkdir(parents=True, exist_ok=True)
        self._full_file = lru_cache(OPEN_FILES)(lambda number: self._read(self._file(number)))
        """Maps a full file into memory; OPEN_FILES of them stay mapped."""
        files = sorted(directory.glob("[0-9]*.npy"))
        self._full = len(files)
        self._tail: list[np.void] = []
        if files and len(last := self._read(files[-1])) < ROWS_PER_FILE:
            self._full -= 1
            self._tail = list(last)
        self.tokens = 0
        """Number of answer tokens in all rows."""
        self.next_number = 0
        """The number of the last stored conversation, plus one."""
        for file in files:
            rows_Z = self._read(file)
            self.tokens += int(rows_Z["is_answer"].sum())
            self.next_number = int(rows_Z["number"][-1]) + 1

    def __len__(self) -> int:
        return self._full * ROWS_PER_FILE + len(self._tail)

    def append(self, conversation: Conversation) -> None:
        length = len(conversation.tokens)
        assert length <= self.width and conversation.number >= self.next_number
        row_1 = np.zeros(1, self._dtype)
        row = row_1[0]
        row["number"], row["temperature"], row["length"] = conversation.number, conversation.temperature, length
        row["tokens"][:length], row["is_answer"][:length] = conversation.tokens, conversation.is_answer
        self._tail.append(row)
        self.tokens += sum(conversation.is_answer)
        self.next_number = conversation.number + 1
        if len(self._tail) == ROWS_PER_FILE:
            self.flush()
            self._full += 1
            self._tail = []

    def flush(self) -> None:
        """Write the rows that are only in memory. If the process is killed meanwhile, the previous file remains."""
        if not self._tail:
            return
        rows_Z = np.array(self._tail, self._dtype)
        replace_file(self._file(self._full), lambda opened: np.save(opened, rows_Z))

    def rows(self, index_Z: Sequence[int]) -> np.ndarray:
        """Return the rows at these indices as a structured array [Z] with the fields number, temperature, length,
        tokens [S] and is_answer [S]."""
        found_Z = np.empty(len(index_Z), self._dtype)
        for n, index in enumerate(index_Z):
            file, row = divmod(int(index), ROWS_PER_FILE)
            found_Z[n] = self._tail[row] if file == self._full else self._full_file(file)[row]
        return found_Z

    def answer_counts(self, first: int, vocab: int) -> np.ndarray:
        """Count the occurrences of each token in the answers of the rows from `first` on, int64 [V]."""
        count_V = np.zeros(vocab, dtype=np.int64)
        for begin in range(first, len(self), ROWS_PER_FILE):
            rows_Z = self.rows(range(begin, min(begin + ROWS_PER_FILE, len(self))))
            count_V += np.bincount(rows_Z["tokens"][rows_Z["is_answer"]], minlength=vocab)
        return count_V

    def _file(self, number: int) -> Path:
        return self._directory / f"{number:06d}.npy"

    def _read(self, file: Path) -> np.ndarray:
        rows_Z = np.load(file, mmap_mode="r")
        if rows_Z.dtype != self._dtype:
            raise ValueError(
                f"{file}: rows of {rows_Z.dtype['tokens'].shape[0]} tokens; this run needs {self.width}; "
                "give another --out, or the options of the run that wrote it"
            )
        return rows_Z


@dataclass(frozen=True)
class ChatFormat:
    """The tokens that a chat template puts around texts. A model without a template has only the opening."""

    opening: tuple[int, ...]
    """Tokens before the first user's text, or before a text of a model without a template."""
    closing: tuple[int, ...] = ()
    """Tokens after a user's text, up to the answer."""
    between: tuple[int, ...] | None = None
    """Tokens after an answer, up to the next user's text; None: there are no further turns."""
    ends: frozenset[int] = frozenset()
    """Tokens that end a user's text."""
    special: frozenset[int] = frozenset()

    @property
    def is_chat(self) -> bool:
        return bool(self.closing)

    @staticmethod
    def of(tokenizer: Tokenizer) -> ChatFormat:
        """Find the tokens that the tokenizer's chat template puts around texts. Raises ValueError for a template that
        changes texts or begins with the user's text, and for a model with neither a template nor a token that begins
        texts."""
        special = frozenset(tokenizer.special_ids) | frozenset(tokenizer.eos_ids)
        if not tokenizer.has_chat_template:
            if tokenizer.start_id is None:
                raise ValueError("the target has neither a chat template nor a token that begins texts; give --prompts")
            return ChatFormat((tokenizer.start_id,), special=special)
        user, probe = {"role": "user", "content": PROBE}, tokenizer.encode(PROBE, False)
        ids = tokenizer.chat([user])
        found = [i for i in range(len(ids)) if ids[i : i + len(probe)] == probe]
        if not found:
            raise ValueError(f"the chat template shows no {PROBE!r} where a user's text is {PROBE!r}")
        opening, closing = ids[: found[-1]], ids[found[-1] + len(probe) :]
        if not opening:
            raise ValueError(
                "the chat template begins with the user's text, so the target cannot write it; give --prompts"
            )
        ends = frozenset([*closing[:1], *tokenizer.eos_ids])
        between = _between(tokenizer, [*opening, *probe, *closing, *probe], [*probe, *closing])
        return ChatFormat(tuple(opening), tuple(closing), between, ends, special)


def _between(tokenizer: Tokenizer, begin: list[int], end: list[int]) -> tuple[int, ...] | None:
    roles = ("user", "assistant", "user")
    try:
        ids = tokenizer.chat([{"role": role, "content": PROBE} for role in roles])
    except ValueError:
        return None
    if ids[: len(begin)] != begin or ids[-len(end) :] != end or len(ids) <= len(begin) + len(end):
        return None
    return tuple(ids[len(begin) : -len(end)])


@dataclass(frozen=True)
class TalkSettings:
    """Settings for writing conversations. Raises ValueError naming the field."""

    temperatures: tuple[float, ...] = TEMPERATURES
    """Temperatures of answers; successive conversations take them in turn."""
    width: int = 512
    """Maximum number of tokens of a conversation."""
    user_tokens: int = 128
    """Maximum number of tokens of a user turn."""
    answer_tokens: int = 320
    """Maximum number of tokens of an answer."""
    turns: int = 2
    """Maximum number of user turns of a conversation."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperatures or not all(0 <= each <= 2 for each in self.temperatures):
            raise ValueError(f"temperatures={self.temperatures}; allowed: at least one, each from 0 to 2")
        for name, least in (("width", 32), ("user_tokens", 1), ("answer_tokens", 1), ("turns", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}; allowed: >= {least}")


class TalkWriter:
    """Writes the conversations with the numbers first, first + stride, .. to a store, in this order. Raises ValueError
    if the target cannot write them."""

    def __init__(
        self,
        pair: ModelPair,
        settings: TalkSettings,
        store: ConversationStore,
        *,
        slots: int,
        pages: int | None = None,
        block: int = 16,
        prefill_chunk: int = 4096,
        first: int = 0,
        stride: int = 1,
        prompts: Sequence[Sequence[int]] = (),
        mixed: bool = True,
    ) -> None:
        """`slots`: conversations that are continued at once. `pages`: KV pages for them. `prompts`: token ids of given
        prompts, template included. Every second conversation begins with one of these, or every one if not `mixed`."""
        self._settings, self._store = settings, store
        self._format = _format_of(pair.tokenizer, prompts, mixed)
        self._eos = frozenset(pair.tokenizer.eos_ids)
        self._prompts, self._mixed = prompts, bool(self._format.opening)
        if pair.max_context < settings.width:
            raise ValueError(f"width={settings.width}; the models have contexts of {pair.max_context} tokens")
        if (size := max(map(len, [self._format.opening, *prompts])) + LEAST_ANSWER) > settings.width:
            raise ValueError(f"prompts of {size} tokens; allowed with --width {settings.width}: fewer than that")
        self.engine = local_engine(
            pair,
            EngineConfig(
                form="lockstep",
                block=block,
                max_slots=slots,
                max_context=settings.width,
                pages=pages or slots * (settings.width + 2 * block),
                prefill_chunk=prefill_chunk,
                prefix_cache=False,
                max_chains=0,
            ),
        )
        self._stride, self._slots = stride, slots
        self._active: dict[int, Conversation] = {}
        self._next_number = first + stride * max(0, -(-(store.next_number - first) // stride))
        """Number of the next conversation to begin."""
        self._unstored = self._next_number
        """Number of the next conversation to store. Conversations with higher numbers wait in `_waiting` once they are
        complete."""
        self._waiting: dict[int, Conversation | None] = {}
        self.drawn = 0
        """Number of tokens that the target drew in all turns, including those of dropped conversations."""
        self.dropped: Counter[str] = Counter()
        """Number of dropped conversations by reason."""
        self._kept, self._dropped_at_first = 0, 0
        """Number of stored conversations, and of those that were dropped before the first one was stored."""

    def write(self, until: Callable[[], bool]) -> None:
        """Write conversations until `until` returns True. `until` is called before a conversation is stored.
        Conversations that have begun continue at the next call. Raises ValueError if none of the first `MOST_DROPPED`
        is kept."""
        while True:
            self._store_in_order(until)
            if until():
                break
            self._begin()
            for output in self.engine.step():
                if output.answer is not None:
                    self._take(output.answer)
        self._store.flush()

    def _begin(self) -> None:
        # Few conversations wait for an earlier one, so that memory is bounded.
        while len(self._active) < self._slots and self._next_number < self._unstored + 4 * self._slots * self._stride:
            conversation = self._new(self._next_number)
            self._active[conversation.number] = conversation
            self._next_number += self._stride
            self._submit(conversation)

    def _new(self, number: int) -> Conversation:
        settings, index, is_given = self._settings, number // self._stride, bool(self._prompts)
        if self._prompts and self._mixed:
            index, is_given = index // 2, index % 2 == 1
        conversation = Conversation(number, settings.temperatures[index % len(settings.temperatures)])
        conversation.add(self._prompts[index % len(self._prompts)] if is_given else self._format.opening)
        conversation.answering = is_given or not self._format.is_chat
        return conversation

    def _submit(self, conversation: Conversation) -> None:
        settings, temperature = self._settings, conversation.temperature
        room = settings.width - len(conversation.tokens)
        if conversation.answering:
            params = SamplingParams(
                method=Method.TARGET, temperature=temperature, max_tokens=min(room, settings.answer_tokens)
            )
        else:
            params = SamplingParams(
                method=Method.TARGET,
                temperature=min(temperature or 1.0, USER_TEMPERATURE),
                max_tokens=min(room, settings.user_tokens),
                stop_token_ids=tuple(sorted(self._format.ends - self._eos)),
            )
        seed = self._seed(conversation.number, 2 * conversation.answers + conversation.answering)
        request = Request(str(conversation.number), tuple(conversation.tokens), replace(params, seed=seed))
        self.engine.submit(request)

    def _seed(self, number: int, part: int) -> int:
        text = f"{self._settings.seed}/{number}/{part}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1

    def _take(self, answer: Answer) -> None:
        """Process a turn that the engine has finished: continue, complete or drop its conversation."""
        conversation = self._active[int(answer.request_id)]
        tokens = list(answer.tokens)
        self.drawn += len(tokens)
        if answer.error:
            raise ValueError(f"the target cannot write: {answer.error}")
        take = self._take_answer if conversation.answering else self._take_user_turn
        reason = take(conversation, tokens)
        if reason is None:
            self._submit(conversation)
            return
        del self._active[conversation.number]
        if conversation.answers:
            self._waiting[conversation.number] = conversation
        else:
            self._waiting[conversation.number] = None
            self.dropped[reason] += 1

    def _take_user_turn(self, conversation: Conversation, tokens: list[int]) -> str | None:
        """Add a user turn to its conversation. Returns None if the conversation continues, otherwise the reason for
        its end, for which a conversation without an answer is dropped."""
        if not tokens or tokens[-1] not in self._format.ends:
            return "a user turn without end"
        text = tokens[:-1]
        if not text or self._format.special & set(text):
            return "a user turn of special tokens"
        if len(conversation.tokens) + len(text) + len(self._format.closing) + LEAST_ANSWER > self._settings.width:
            return "a user turn too long"
        conversation.add([*text, *self._format.closing])
        conversation.answering = True
        return None

    def _take_answer(self, conversation: Conversation, tokens: list[int]) -> str | None:
        """Like `_take_user_turn`, for an answer."""
        if len(tokens) < LEAST_ANSWER:
            return "an answer nearly empty"
        if repeated_share(tokens) > MOST_REPEATED:
            return "an answer that repeats itself"
        conversation.add(tokens, is_answer=True)
        conversation.answers += 1
        between = self._format.between
        if tokens[-1] not in self._eos or between is None or conversation.answers >= self._settings.turns:
            return "complete"
        # If the template ends an answer with the token that the target has drawn, it is not added again.
        rest = between[1:] if between[:1] == (tokens[-1],) else between
        if len(conversation.tokens) + len(rest) + LEAST_ANSWER > self._settings.width:
            return "complete"
        conversation.add(rest)
        conversation.answering = False
        return None

    def _store_in_order(self, until: Callable[[], bool]) -> None:
        while self._unstored in self._waiting and not until():
            conversation = self._waiting.pop(self._unstored)
            self._unstored += self._stride
            if conversation is None:
                self._dropped_at_first += not self._kept
                if self._dropped_at_first >= MOST_DROPPED:
                    reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
                    raise ValueError(
                        f"the target writes nothing to learn from: {reasons}; give --prompts, or another --temperature"
                    )
                continue
            self._kept += 1
            self._store.append(conversation)


def _format_of(tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], mixed: bool) -> ChatFormat:
    """Find the chat format. Without an opening if all user turns are given, so that the target writes none."""
    if mixed or not prompts:
        try:
            return ChatFormat.of(tokenizer)
        except ValueError as error:
            if not prompts:
                raise
            logger.warning("all conversations begin with given prompts: %s", error)
    special = frozenset(tokenizer.special_ids) | frozenset(tokenizer.eos_ids)
    return ChatFormat((), special=special)


def repeated_share(tokens: Sequence[int]) -> float:
    """Return the share of the 4-grams that have occurred before."""
    grams = [tuple(tokens[i : i + GRAM]) for i in range(len(tokens) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
