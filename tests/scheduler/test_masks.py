"""Masks of many rows, written together, equal those of a slow reference that reads every answer from its beginning for
each mask."""

from __future__ import annotations

import random
import time

import llguidance
import numpy as np
import pytest

from smc import constraint_masks, constraints
from smc.api.constraint import Constraint
from smc.constraint_masks import Follower, MaskWriter
from smc.constraints import Compiler
from smc.mask_reader import MaskPath
from smc.stops import StopMachine, TokenBytes

TEXTS = [bytes([byte]) for byte in range(32, 127)] + [b'"a', b'":', b"ab", b"abc", b"12", b'", "', b"true", b"\n"]
AFTER, EOS = len(TEXTS), (len(TEXTS) + 1, len(TEXTS) + 2)
VOCAB = len(TEXTS) + 3
IDS = {text: token for token, text in reversed(list(enumerate(TEXTS)))}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"type": "array", "items": {"type": "integer"}}},
    "required": ["a", "b"],
}
REQUESTS: dict[str, tuple[dict | None, tuple[bytes, ...]]] = {
    "schema": ({"json_schema": SCHEMA}, ()),
    "reasons": ({"json_object": True, "after": AFTER}, ()),
    "choices": ({"choice": ["abc", "abd", "a"]}, ()),
    "expression": ({"regex": "a(ab|b)*c?"}, (b"ab", b"c")),
    "after a token, without words": ({"regex": "(ab){1,3}", "after": AFTER}, (b"bab",)),
    "words alone": (None, (b"ab", b"q", b"b12", b"12a1")),
}


def compiler_of(vocab: int = VOCAB) -> Compiler:
    texts = [*TEXTS, *[b""] * (vocab - len(TEXTS))]
    offset_V = np.concatenate(([0], np.cumsum([len(text) for text in texts]))).astype(np.int32)
    return Compiler(TokenBytes(np.frombuffer(b"".join(texts), np.uint8).copy(), offset_V, EOS))


def machine_of(name: str) -> StopMachine:
    constraint, bad_words = REQUESTS[name]
    return StopMachine.of((), (), (), None if constraint is None else Constraint.of(constraint), bad_words)


def plain(compiler: Compiler, machine: StopMachine, path: MaskPath) -> np.ndarray:
    """Reference masks of one path, bool [count, vocab]: True where the token is allowed."""
    allowed_RV = np.ones((path.masks, compiler.vocab), dtype=bool)
    ends = list(EOS)
    constraint = machine.constraint
    for row in range(path.masks):
        answer = path.answer_L[: path.first + row].tolist()
        if constraint is not None:
            after = constraint.after
            begin = 0 if after is None else answer.index(after) + 1 if after in answer else None
            text = None if begin is None else answer[begin:]
            end = next((t for t, token in enumerate(text or ()) if token in EOS), None)
            if text is None:
                allowed_RV[row, ends] = False
            elif end is not None and path.first > begin + end:
                allowed_RV[row] = False
                allowed_RV[row, ends] = True
            else:
                matcher = compiler.start(constraint).deep_copy()
                text = text if end is None else text[:end]
                if any(not matcher.try_consume_tokens([token]) for token in text):
                    continue_after = allowed_RV[row:]
                    continue_after[:] = True
                    for later in range(row, path.masks):
                        take_bad_words(machine, path.answer_L[: path.first + later].tolist(), allowed_RV[later])
                    return allowed_RV
                bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
                found_V = np.unpackbits(bits, bitorder="little")[: compiler.vocab + 1].astype(bool)
                allowed_RV[row] = found_V[:-1]
                allowed_RV[row, ends] = found_V[-1]
                if end is not None:
                    allowed_RV[row] = False
                    allowed_RV[row, ends] = True
        take_bad_words(machine, answer, allowed_RV[row])
    return allowed_RV


def take_bad_words(machine: StopMachine, answer: list[int], allowed_V: np.ndarray) -> None:
    # Bad words that are already there were forced by the constraint; reading starts again after them.
    text = b"".join(TEXTS[token] for token in answer if token < len(TEXTS))
    tail = text[max(len(text) - max(map(len, machine.bad_words), default=1) + 1, 0) :]
    while ends := [at + len(word) for word in machine.bad_words if (at := tail.find(word)) >= 0]:
        tail = tail[min(ends) :]
    bad = [t for t, more in enumerate(TEXTS) if any(word in tail + more for word in machine.bad_words)]
    left_V = allowed_V.copy()
    left_V[bad] = False
    if left_V.any():
        allowed_V[:] = left_V


def opened(masks_RW: np.ndarray, vocab: int) -> np.ndarray:
    return np.unpackbits(masks_RW.view(np.uint8), axis=-1, bitorder="little")[:, :vocab].astype(bool)


class Tree:
    """Answers of a request that grow by random tokens, most of them allowed, and are resampled."""

    def __init__(self, name: str, dice: random.Random, compiler: Compiler) -> None:
        self.machine, self._dice, self._compiler = machine_of(name), dice, compiler
        self.answers: list[list[int]] = [[] for _ in range(dice.randint(1, 4))]

    def next(self, answer: list[int]) -> int:
        path = MaskPath(np.array(answer, np.int64), len(answer), 0, 1)
        allowed = np.flatnonzero(plain(self._compiler, self.machine, path)[0])
        if self._dice.random() < 0.15 or not len(allowed):
            return self._dice.randrange(VOCAB)
        if AFTER in allowed and self._dice.random() < 0.3:
            return AFTER
        return int(self._dice.choice(allowed[-6:] if self._dice.random() < 0.3 else allowed))

    def paths(self, kind: str, row: int) -> list[MaskPath]:
        """Paths of random answers: blocks that often share tokens (`blocks`), or one mask each (`rows`). Their masks
        begin at `row`, six rows apart."""
        dice, found = self._dice, []
        blocks: list[tuple[list[int], list[int]]] = []
        for _ in range(dice.randint(1, 8)):
            if blocks and dice.random() < 0.7:
                origin, tokens = dice.choice(blocks)
                tokens = tokens[: dice.randint(0, len(tokens))]
            else:
                origin, tokens = dice.choice(self.answers), []
                # An answer that was drafted after an inner node has its last tokens cut.
                origin = origin[: len(origin) - dice.choice([0, 0, 0, min(2, len(origin))])]
            for _ in range(dice.randint(1, 6) - len(tokens)):
                tokens = [*tokens, self.next(origin + tokens)]
            blocks.append((origin, tokens))
        for origin, tokens in blocks:
            answer_L = np.array(origin + tokens, dtype=np.int64)
            first, count = (len(origin) + 1, len(tokens)) if kind == "blocks" else (len(answer_L), 1)
            found.append(MaskPath(answer_L, first, row, count))
            row += 6
        chosen = dice.choice(blocks)
        self.answers = [dice.choice(self.answers), chosen[0] + chosen[1][: dice.randint(0, len(chosen[1]))]]
        return found


def test_masks_that_get_no_processor_time_are_waited_for(monkeypatch):
    """A busy machine is not the request's fault."""
    run = constraint_masks._Drive.run

    def late(drive):
        time.sleep(0.3)
        run(drive)

    monkeypatch.setattr(constraint_masks._Drive, "run", late)
    monkeypatch.setattr(constraint_masks, "WAIT_SECONDS", 0.05)
    monkeypatch.setattr(constraint_masks, "SHARED_SECONDS", -60.0)
    compiler = compiler_of(VOCAB)
    follower = Follower(StopMachine.of((), (), (), Constraint.of({"choice": ["ab", "ac"]})), compiler)
    masks_RW = np.zeros((1, compiler.words), dtype=np.int32)
    none_0 = np.zeros(0, dtype=np.int64)
    MaskWriter(compiler).write([(follower, [MaskPath(none_0, 0, 0, 1)])], masks_RW)
    assert follower.failure is None and masks_RW.any()


def test_the_wait_begins_when_all_threads_have_started(monkeypatch):
    """A busy machine takes long to start a thread for each request. The last one has as much time as the first."""
    run, new = constraint_masks._Drive.run, constraint_masks._new_executor

    def late(drive):
        time.sleep(0.1)
        run(drive)

    def slowly(count: int):
        time.sleep(0.2)
        return new(count)

    monkeypatch.setattr(constraint_masks._Drive, "run", late)
    monkeypatch.setattr(constraint_masks, "_new_executor", slowly)
    monkeypatch.setattr(constraint_masks, "PATIENCE_SECONDS", 1.4)
    monkeypatch.setattr(constraint_masks, "WAIT_SECONDS", 60.0)
    compiler = compiler_of()
    followers = [Follower(machine_of("choices"), compiler) for _ in range(8)]
    for follower in followers:
        follower.alone = True
    masks_RW = np.zeros((len(followers), compiler.words), dtype=np.int32)
    path = MaskPath(np.array([IDS[b"a"]]), 1, 0, 1)
    needed = [(follower, [path._replace(row=row)]) for row, follower in enumerate(followers)]
    MaskWriter(compiler).write(needed, masks_RW)
    assert [follower.failure for follower in followers] == [None] * len(followers)
    assert masks_RW.any(1).all()


@pytest.mark.parametrize("alone", [False, True], ids=["together", "alone"])
@pytest.mark.parametrize(("vocab", "threads"), [(VOCAB, 2), (127, 1)], ids=["words", "whole words"])
def test_masks_of_many_rows_are_those_of_a_plain_walk(vocab: int, threads: int, alone: bool, monkeypatch):
    """Random trees of several requests over rounds in which followers continue, or start anew as after a preemption.
    `whole words`: the library's own end token fills the last bit of the last 32-bit word."""
    for name in ("ROUND_SECONDS", "LEAST_SECONDS", "WAIT_SECONDS"):  # however busy the machine is
        monkeypatch.setattr(constraint_masks, name, 60.0)
    monkeypatch.setattr(constraint_masks, "SHARED_SECONDS", -60.0 if alone else 60.0)
    executor = llguidance.LLExecutor(threads), ()
    monkeypatch.setattr(constraint_masks, "_shared_executor", lambda: executor)
    compiler, dice = compiler_of(vocab), random.Random(f"{vocab} {threads}")
    seen = {"copied": 0, "refused": 0}
    for _ in range(12):
        names = dice.choices(list(REQUESTS), k=dice.randint(1, 5))
        trees = [Tree(name, dice, compiler) for name in names]
        followers = [Follower(tree.machine, compiler) for tree in trees]
        for _ in range(5):
            kind = dice.choice(["blocks", "rows"])
            asked: list[tuple[Follower, list[MaskPath]]] = []
            for g, (tree, follower) in enumerate(zip(trees, followers)):
                asked.append((follower, tree.paths(kind, g * 48)))
            masks_RW = np.full((48 * len(trees) + 1, compiler.words), 5, dtype=np.int32)
            MaskWriter(compiler).write(asked, masks_RW)
            found_RV, rest = opened(masks_RW, vocab), set(range(len(masks_RW)))
            for tree, (_, paths) in zip(trees, asked):
                for path in paths:
                    expected_RV = plain(compiler, tree.machine, path)
                    rows = range(path.row, path.row + path.masks)
                    assert (found_RV[rows.start : rows.stop] == expected_RV).all()
                    rest -= set(rows)
                    seen["refused"] += int(expected_RV.all(-1).sum())
                seen["copied"] += sum(p.masks for p in paths) - len(
                    {tuple(p.answer_L[: p.first + r].tolist()) for p in paths for r in range(p.masks)}
                )
            assert (masks_RW[sorted(rest)] == -1).all()
            if dice.random() < 0.3:
                again = dice.randrange(len(trees))
                followers[again] = Follower(trees[again].machine, compiler)
    assert min(seen.values()) > 80


def test_a_constraint_at_a_limit_of_the_library_has_failed(monkeypatch):
    """All masks of its request allow nothing then, also those of later calls, which do not ask the library. Another
    request in the same call is not affected."""
    limits = llguidance.LLParserLimits(verbose_errors=False, step_max_items=60)
    compiler = compiler_of()
    machine = StopMachine.of((), (), (), Constraint.of({"grammar": LIMITED}))
    other = Follower(machine, compiler)
    monkeypatch.setattr(constraints, "LIMITS", limits)
    limited_compiler = compiler_of()
    limited = Follower(machine, limited_compiler)
    letters = [IDS[b"a"]] * 40
    answers = [letters[:1], [*letters[:1], IDS[b"b"]], letters, [*letters[:-1], IDS[b"b"]]]
    paths = [MaskPath(np.array(answer), 1, 50 * i, len(answer)) for i, answer in enumerate(answers)]
    beside = [path._replace(row=path.row + 200) for path in paths]
    found_RW = np.zeros((400, compiler.words), dtype=np.int32)
    writer = MaskWriter(limited_compiler)
    writer.write([(limited, paths), (other, beside)], found_RW)
    assert limited.failure.startswith("constraint: the grammar allows too many alternatives after 40 tokens")
    assert other.failure is None
    writer.write([(limited, paths)], failed_RW := np.zeros((200, compiler.words), dtype=np.int32))
    MaskWriter(compiler).write([(Follower(machine, compiler), beside)], expected_RW := np.zeros_like(found_RW))
    for path, after in zip(paths, beside):
        rows, rows_beside = slice(path.row, path.row + path.masks), slice(after.row, after.row + after.masks)
        assert not found_RW[rows].any() and not failed_RW[rows].any()
        assert (found_RW[rows_beside] == expected_RW[rows_beside]).all()
    assert limited.reader._matcher is None


def test_a_dead_end_is_a_failure(monkeypatch):
    """Constraints are compiled without the dead ends that can be found, so the library is given one here."""
    compiler = compiler_of()
    matcher = llguidance.LLMatcher(compiler._vocabulary(), DEAD_END, log_level=0)
    monkeypatch.setattr(compiler, "start", lambda constraint, seconds: matcher)
    follower = Follower(StopMachine.of((), (), (), Constraint.of({"grammar": DEAD_END})), compiler)
    answer = np.array([IDS[b"a"], IDS[b"b"]])
    masks_RW = np.ones((1, compiler.words), dtype=np.int32)
    MaskWriter(compiler).write([(follower, [MaskPath(answer, 2, 0, 1)])], masks_RW)
    assert "the grammar allows nothing after 2 tokens of the answer" in follower.failure
    assert not masks_RW.any()


def test_slow_masks_fail_without_others_and_in_time():
    """The library takes about half a second for each mask of the slow requests, and cannot be interrupted."""
    compiler = compiler_of()
    text = [IDS[b"a"]] * 9
    slow = [Follower(StopMachine.of((), (), (), Constraint.of({"grammar": SLOW})), compiler) for _ in range(16)]
    names = list(REQUESTS)
    quick = [Follower(machine_of(name), compiler) for name in names]
    texts = {name: np.array([IDS[b"a"]]) for name in names}
    needed = [(follower, [MaskPath(np.array(text), 9, i, 1)]) for i, follower in enumerate(slow)]
    needed += [
        (follower, [MaskPath(texts[name], 0, 16 + 2 * i, 2)]) for i, (name, follower) in enumerate(zip(names, quick))
    ]
    masks_RW = np.zeros((16 + 2 * len(names), compiler.words), dtype=np.int32)
    writer, began = MaskWriter(compiler), time.monotonic()
    writer.write(needed, masks_RW)
    took = time.monotonic() - began
    assert all("takes too much time" in follower.failure for follower in slow)
    assert not masks_RW[:16].any()
    for name, (follower, (path,)) in zip(names, needed[16:]):
        assert follower.failure is None
        expected_RV = plain(compiler, machine_of(name), path)
        assert (opened(masks_RW[path.row : path.row + 2], VOCAB) == expected_RV).all()
    assert took < constraint_masks.SHARED_SECONDS + constraint_masks.WAIT_SECONDS + 1.5
    writer.begin_round()
    writer.write(needed[16:], masks_RW)  # while the abandoned threads still work
    assert all(follower.failure is None for follower in quick)


class Starved:
    """Threads of the library that a busy machine gives no processor time for a while."""

    def __init__(self, executor: llguidance.LLExecutor, seconds: float) -> None:
        self._executor, self._seconds = executor, seconds

    def unsafe_compute_mask_ptr(self, *arguments) -> None:
        time.sleep(self._seconds)
        self._executor.unsafe_compute_mask_ptr(*arguments)

    def consume_token_par(self, reads: list) -> list[bool]:
        return self._executor.consume_token_par(reads)


def test_masks_may_wait_for_a_processor(monkeypatch):
    """Only processor time counts: masks that take over half a second without using any are computed."""
    compiler, new = compiler_of(), constraint_masks._new_executor

    def starved(count: int) -> tuple[Starved, tuple[int, ...]]:
        executor, threads = new(count)
        return Starved(executor, 0.6), threads

    monkeypatch.setattr(constraint_masks, "_new_executor", starved)
    follower = Follower(machine_of("choices"), compiler)
    follower.alone = True
    masks_RW = np.zeros((1, compiler.words), dtype=np.int32)
    path = MaskPath(np.array([IDS[b"a"]]), 1, 0, 1)
    MaskWriter(compiler).write([(follower, [path])], masks_RW)
    assert follower.failure is None
    assert (opened(masks_RW, VOCAB) == plain(compiler, machine_of("choices"), path)).all()


LIMITED = 'start: item*\nitem: "a" | "b" | item item\n'
DEAD_END = 'start: "a" "b" x | "a" "a"\nx: x "c"\n'
SLOW = "start: e\ne: " + " | ".join(" ".join(["e"] * k) for k in range(2, 40)) + " | /[a-z]/\n"
