"""Traces: what a target answered, and what a draft would propose anywhere around these answers. An engine replays them
with other settings of exact decoding, in a hundredth of the time of the models.

Exact decoding gives the target's own answer, whatever is drafted. So the target writes each answer once. The draft is
run once for each sequence (a *node*) that any replay asks about, and what it offers there is stored: its likeliest
tokens with the log-probabilities that they win the target's draw (`smc.algorithm.coupling`), at one exponent for all
answers of a temperature, fitted to the target's draws. Everything else of a replay is the real engine: scheduler,
policy, trees, verification.

A replay knows a token by its place among the offers of its node. Requests have temperature 0, because the noise of the
draws is in the stored probabilities already.

Local axes: Z tokens that are looked up at once. C are the offers of a node."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from smc.algorithm.coupling import FIRST_GREEDY_EXPONENT
from smc.algorithm.expansion import CANDIDATES_PER_ROW
from smc.api.engine_config import PATHS, EngineConfig
from smc.api.request import Request
from smc.api.sampling_params import Method, SamplingParams
from smc.arrays import offsets
from smc.attention.backend import ForwardBatch
from smc.executor.forward import Reader, StaticForward
from smc.executor.ops import RoundOps
from smc.executor.round_executor import LocalRoundExecutor, RoundExecutor
from smc.executor.worker import ModelWorker
from smc.model.config import ModelConfig
from smc.model.loader import random_model
from smc.model.presets import NoText
from smc.scheduler.engine import Engine
from smc.stops import TokenBytes
from smc.types import ModelRole

OFFERS = CANDIDATES_PER_ROW
"""Number of offers of a node."""
OTHER = OFFERS
"""Token of a replay for a token of the answer that is no offer."""
NAMES = OFFERS + 1, 31
"""The first token that a replay's prompt is made of, and the number of such tokens."""
VOCAB = 64
UNKNOWN = -1
"""A token that was not written to a file."""
NEVER = -40.0
"""Logit of a token that is not offered."""
SURE = 40.0
"""Logit of the token that the target draws."""
PROMPT = 2
"""Tokens of a replay's prompt."""
HIDDEN = 16
LEAST_MASS = -6.5
"""Log-probability that an answer goes through a node, below which the node is not worth a run in advance."""
LEAST_WIN = -8.0
"""Log-probability of winning below which a file leaves offers out, beyond the first."""


@dataclass
class Trace:
    """One answer of the target, with the draft's offers around it."""

    text: tuple[int, ...]
    """Tokens of prompt and answer."""
    answer_from: int
    """Index of the answer's first token."""
    seed: int
    temperature: float
    subject: str = ""
    """Kind of the prompt, such as chat."""
    parents: list[int] = field(default_factory=list)
    """Node before each node. The first nodes are those of the answer: node i has i tokens of it."""
    places: list[int] = field(default_factory=list)
    """Place of each node's last token among the offers of the node before."""
    tokens: list[int] = field(default_factory=list)
    """Last token of each node."""
    offered: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    """Offers [C] of each node that the draft has run, int32, and their log-probabilities of winning [C], float32."""
    children: dict[tuple[int, int], int] = field(default_factory=dict)
    """Node after a node and a place."""

    @property
    def answer(self) -> tuple[int, ...]:
        return self.text[self.answer_from :]

    def add(self, parent: int, place: int, token: int) -> int:
        node = len(self.parents)
        self.parents.append(parent)
        self.places.append(place)
        self.tokens.append(token)
        self.children[parent, place] = node
        return node

    def child(self, node: int, place: int) -> int:
        """Return the node after a node and the token at a place among its offers."""
        found = self.children.get((node, place))
        if found is None:
            assert node in self.offered, "a token that was offered"
            token_C = self.offered[node][0]
            found = self.add(node, place, int(token_C[place]) if place < len(token_C) else UNKNOWN)
        return found

    def place_of_draw(self, node: int) -> int:
        """Return the place of the target's draw after a node of the answer."""
        return self.places[node + 1] if node < len(self.answer) else 0

    def branch(self, node: int) -> list[int]:
        """Return the last node of the answer before a node, or itself, and the nodes from there to the node."""
        found = [node]
        while node > len(self.answer):
            node = self.parents[node]
            found.append(node)
        return found[::-1]


class NodeReader(Protocol):
    """Runs a draft at nodes of traces."""

    exponents: dict[float, float]
    """Exponent of each temperature."""

    def read(self, wanted: Sequence[tuple[int, Trace, int]]) -> None:
        """Store the offers of nodes, given with their traces and these traces' numbers in ascending order of numbers.
        Nodes before them have been read."""
        ...

    def holds(self, number: int, trace: Trace, node: int) -> bool:
        """Whether the keys and values of a node are known."""
        ...


class TraceLibrary:
    """Traces that an engine can replay."""

    def __init__(self, traces: Sequence[Trace], reader: NodeReader | None) -> None:
        """`reader`: runs the draft at nodes that no replay has asked about before. It has read the answers."""
        self.traces, self.reader = list(traces), reader
        self.exponents = dict(reader.exponents) if reader else {}
        self.average: tuple[np.ndarray, np.ndarray] | None = None
        """What nodes offer that the draft has not run, where there is no reader; None: such nodes are refused."""
        self.inner_nodes = True
        """Whether rows ahead may begin at inner nodes."""
        self._numbers = list(range(len(self.traces)))
        """Numbers by which the reader knows the traces."""

    def part(self, subject: str, temperature: float) -> TraceLibrary:
        """Return the traces of one kind and temperature."""
        index = [
            i for i, trace in enumerate(self.traces) if (trace.subject, trace.temperature) == (subject, temperature)
        ]
        found = TraceLibrary([self.traces[i] for i in index], self.reader)
        found.average, found.inner_nodes = self.average, self.inner_nodes
        found._numbers = [self._numbers[i] for i in index]
        return found

    def ask(self, wanted: Sequence[tuple[int, int]]) -> None:
        """Let the draft run these nodes, given as numbers of traces and nodes, where it has not yet."""
        missing = {each for each in wanted if each[1] not in self.traces[each[0]].offered}
        if not missing:
            return
        if self.average is not None:
            for number, node in missing:
                self.traces[number].offered[node] = self.average
            return
        if self.reader is None:
            raise ValueError("the traces lack what a draft would offer here; allowed: to give the draft, too")
        left = set(missing)
        for number, node in missing:
            # Nodes that were read from a file have no keys and values here.
            trace, known = self.traces[number], self._numbers[number]
            left |= {(number, each) for each in trace.branch(node)[1:] if not self.reader.holds(known, trace, each)}
        while left:
            ready = sorted(each for each in left if (each[0], self.traces[each[0]].parents[each[1]]) not in left)
            self.reader.read([(self._numbers[number], self.traces[number], node) for number, node in ready])
            left -= set(ready)

    def offer_averages(self) -> None:
        """From now on, let nodes that the draft has not run offer what its nodes offer on average: at each place the
        mean probability. These are unlikely nodes, if the file was grown."""
        offers = [wins_C for trace in self.traces for _, wins_C in trace.offered.values()]
        mean_C = np.zeros(OFFERS)
        for wins_C in offers:
            mean_C[: len(wins_C)] += np.exp(wins_C) / len(offers)
        self.average = np.full(OFFERS, UNKNOWN, np.int32), np.log(np.maximum(mean_C, np.exp(NEVER))).astype(np.float32)

    def grow(self, width: int, depth: int) -> None:
        """Let the draft run likely nodes after every node of the answers, in large batches: at each depth the `width`
        likeliest, and none below `LEAST_MASS`. Replays ask for fewer nodes then, and a pass over few nodes takes as
        long as one over many."""
        heads = [
            [(0.0, number, node)] for number, trace in enumerate(self.traces) for node in range(len(trace.answer) + 1)
        ]
        for _ in range(depth):
            for i, nodes in enumerate(heads):
                wins = [self.traces[number].offered[node][1] for _, number, node in nodes]
                masses = np.concatenate([mass + win_C for (mass, _, _), win_C in zip(nodes, wins)])
                counts = np.array([len(win_C) for win_C in wins])
                owners, places = np.repeat(np.arange(len(nodes)), counts), offsets(counts)
                after = []
                for at in np.argsort(-masses, kind="stable")[: width + 1].tolist():
                    if masses[at] < LEAST_MASS:
                        break
                    _, number, node = nodes[owners[at]]
                    trace = self.traces[number]
                    child = trace.child(node, int(places[at]))
                    # What follows nodes of the answer is grown from there.
                    if child > len(trace.answer):
                        after.append((float(masses[at]), number, child))
                heads[i] = after[:width]
            heads = [nodes for nodes in heads if nodes]
            self.ask([(number, node) for nodes in heads for _, number, node in nodes])


class LookedUpModel:
    """A model whose passes look up traces. A hidden state begins with the number of a trace and a node; -1: not on the
    way of the answer, which is all that the target needs to know."""

    def __init__(self, role: ModelRole, library: TraceLibrary, pages: int) -> None:
        self._is_draft, self._library = role is ModelRole.DRAFT, library
        self._trace_B, self._node_B = (np.zeros(pages + 1, dtype=np.int64) for _ in range(2))

    def run(self, tokens_Z: np.ndarray, batch: ForwardBatch) -> Tensor:
        """Return the hidden states [Z, E] after these tokens."""
        found = np.zeros((len(tokens_Z), HIDDEN), dtype=np.int64)
        at = 0
        for table_L, start, count in zip(batch.table_RL, batch.starts_R.tolist(), batch.counts_R.tolist()):
            for position in range(start, start + count):
                page = table_L[position]
                found[at, :2] = self._after(table_L, position, int(tokens_Z[at]))
                self._trace_B[page], self._node_B[page] = found[at, :2]
                at += 1
        if self._is_draft:
            self._library.ask([(number, node) for number, node in found[:, :2].tolist() if node >= 0])
        return torch.from_numpy(found).float()

    def _after(self, table_L: np.ndarray, position: int, token: int) -> tuple[int, int]:
        if position == 0:
            return token - NAMES[0], -1
        before = table_L[position - 1]
        number, node = int(self._trace_B[before]), int(self._node_B[before])
        if position == 1:
            return (NAMES[1] * number + token - NAMES[0]) % len(self._library.traces), 0
        trace = self._library.traces[number]
        if self._is_draft:
            # A chain of tokens that are not read yet: the node before must be known.
            self._library.ask([(number, node)])
            return number, trace.child(node, token)
        right = 0 <= node < len(trace.answer) and trace.place_of_draw(node) == token
        return number, node + 1 if right else -1

    def logits(self, hidden_RE: Tensor) -> Tensor:
        logits_RV = torch.full((len(hidden_RE), VOCAB), NEVER)
        for logits_V, (number, node) in zip(logits_RV.numpy(), hidden_RE[:, :2].long().tolist()):
            trace = self._library.traces[number]
            if not self._is_draft:
                logits_V[trace.place_of_draw(node) if node >= 0 else 0] = SURE
            elif node in trace.offered:
                # An engine begins with this exponent at temperature 0.
                wins_C = trace.offered[node][1]
                logits_V[: len(wins_C)] = wins_C / FIRST_GREEDY_EXPONENT
        return logits_RV


class LookedUpForward(StaticForward):
    """Passes of few packed rows."""

    def __init__(self, reader: Reader, looked_up: LookedUpModel) -> None:
        super().__init__(reader.model, reader.pool, reader.rope)
        self._looked_up = looked_up

    def run_packed(self, tokens_Z: Tensor, position_Z: Tensor, batch: ForwardBatch) -> Tensor:
        return self._looked_up.run(tokens_Z.numpy(), batch)

    def logits(self, hidden_RE: Tensor, head: Any = None) -> Tensor:
        return self._looked_up.logits(hidden_RE)


class LookUpOps(RoundOps):
    """Operations of rounds, with models that are looked up."""

    def __init__(self, library: TraceLibrary) -> None:
        self._library, self._models = library, dict[ModelRole, LookedUpModel]()

    def _model(self, reader: Reader) -> LookedUpModel:
        if reader.name not in self._models:
            self._models[reader.name] = LookedUpModel(reader.name, self._library, len(reader.pool.keys[0]))
        return self._models[reader.name]

    def forward(self, reader: Reader) -> StaticForward:
        return LookedUpForward(reader, self._model(reader))

    def store_inner_nodes(self, *given: Any) -> None:
        if self._library.inner_nodes:
            super().store_inner_nodes(*given)

    def run_prompt(self, reader: Reader, tokens_T: np.ndarray, batch: ForwardBatch, output_T: np.ndarray) -> Tensor:
        return self._model(reader).run(tokens_T, batch)[output_T]

    def prompt_logits(self, reader: Reader, hidden_RE: Tensor) -> Tensor:
        return self._model(reader).logits(hidden_RE)


def replay_engine(
    library: TraceLibrary, config: EngineConfig, executor: Callable[[RoundExecutor], RoundExecutor] = lambda it: it
) -> Engine:
    """Return an engine that replays traces. `executor`: wraps the executor of its rounds."""
    context = max(len(trace.answer) for trace in library.traces) + PROMPT + 1
    shape = ModelConfig("llama", VOCAB, HIDDEN, 1, 1, 1, HIDDEN, HIDDEN, context + 64, 1e-5, 1e4, None, False)
    config = dataclasses.replace(
        config,
        max_context=context,
        prefix_cache=False,
        pages=4 * config.max_slots * (context + 2 * config.branches * config.block),
        verified=config.verified or PATHS,
    )
    pages, tokenizer = config.pool_pages(context), NoText(VOCAB)
    workers = {
        role: ModelWorker(
            role, random_model(shape, dtype=torch.float32, device="cpu"), width=config.width(context), context=context,
            pages=pages, vocab_size=VOCAB, token_bytes=TokenBytes.of(tokenizer),
        )
        for role in ModelRole
    }  # fmt: skip
    rounds = LocalRoundExecutor(config, workers, LookUpOps(library))
    return Engine(
        config, workers, tokenizer, executor=executor(rounds), pages=dict.fromkeys(ModelRole, pages), context=context
    )


def replayed_request(library: TraceLibrary, number: int, particles: int, name: str | None = None) -> Request:
    """Return the request that replays trace `number` modulo their number."""
    trace = library.traces[number % len(library.traces)]
    number %= NAMES[1] ** PROMPT // len(library.traces) * len(library.traces)
    prompt = tuple(NAMES[0] + each for each in divmod(number, NAMES[1]))
    params = SamplingParams(
        method=Method.EXACT, temperature=0.0, particles=particles, max_tokens=len(trace.answer), ignore_eos=True, seed=0
    )
    return Request(name or str(number), prompt, params)


def save(library: TraceLibrary, path: Path) -> None:
    """Write what replays need of traces to a file of NumPy arrays: no tokens but those of texts, and no unlikely
    offers. Log-probabilities are rounded to multiples of 1/64."""
    arrays: dict[str, Any] = {"exponents": np.array(sorted(library.exponents.items()))}
    for i, trace in enumerate(library.traces):
        nodes = sorted(trace.offered)
        offered = [trace.offered[node] for node in nodes]
        counts = [max(1, int(np.searchsorted(-wins_C, -LEAST_WIN))) for _, wins_C in offered]
        arrays |= {
            f"{i} text": np.array(trace.text, np.int32),
            f"{i} facts": np.array([trace.answer_from, trace.seed, trace.temperature]),
            f"{i} subject": np.array(trace.subject),
            # Parents are mostly the same as before, or one more.
            f"{i} parents": np.diff(np.array(trace.parents, np.int32), prepend=0),
            f"{i} places": np.array(trace.places, np.int8),
            f"{i} offered": np.diff(np.array(nodes, np.int32), prepend=0),
            f"{i} counts": np.array(counts, np.int8),
            f"{i} wins": np.concatenate([64 * wins_C[:n] for (_, wins_C), n in zip(offered, counts)])
            .round()
            .astype(np.int16),
        }
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)


def load(path: Path) -> TraceLibrary:
    """Read traces from a file. They cannot be extended: a draft would have to make all offers anew."""
    with np.load(path) as arrays:
        count = sum(name.endswith(" text") for name in arrays)
        traces = []
        for i in range(count):
            answer_from, seed, temperature = arrays[f"{i} facts"].tolist()
            trace = Trace(
                tuple(arrays[f"{i} text"].tolist()),
                int(answer_from),
                int(seed),
                temperature,
                str(arrays[f"{i} subject"]),
            )
            for parent, place in zip(arrays[f"{i} parents"].cumsum().tolist(), arrays[f"{i} places"].tolist()):
                trace.add(parent, place, UNKNOWN)
            ends = arrays[f"{i} counts"].cumsum(dtype=np.int64)[:-1]
            wins = np.split(np.float32(arrays[f"{i} wins"] / 64), ends)
            for node, win_C in zip(arrays[f"{i} offered"].cumsum().tolist(), wins):
                trace.offered[node] = np.full(len(win_C), UNKNOWN, np.int32), win_C
            traces.append(trace)
        library = TraceLibrary(traces, None)
        library.exponents = dict(arrays["exponents"].tolist())
    return library
