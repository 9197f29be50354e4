"""Traces: what a target answered, and what a draft would propose anywhere around these answers. An engine replays them
with other settings of exact decoding, in a hundredth of the time of the models.

Exact decoding gives the target's own answer, whatever is drafted. So the target writes each answer once. The draft is
run once for each sequence (a *node*) that any replay asks about, and what it offers there is stored: its likeliest
tokens with the log-probabilities that they win the target's draw (`smc.algorithm.coupling`), at one exponent for all
answers of a temperature, fitted to the target's draws. Everything else of a replay is the real engine: scheduler,
policy, trees, verification.

A replay knows a token by its place among the offers of its node. Requests have temperature 0, because the noise of the
draws is in the stored probabilities already.

Local axes: Y nodes that are run at once, Z tokens that are looked up at once. C are the offers of a node."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smc.algorithm.coupling import FIRST_GREEDY_EXPONENT, LEAST_EXPONENT, MOST_EXPONENT, SLACK
from smc.algorithm.expansion import CANDIDATES_PER_ROW
from smc.api.engine_config import PATHS, EngineConfig
from smc.api.request import Request
from smc.api.sampling_params import Method, SamplingParams
from smc.attention.backend import ForwardBatch, TorchAttention
from smc.distill.measure import target_noise
from smc.executor.forward import Reader, StaticForward
from smc.executor.ops import RoundOps
from smc.executor.round_executor import LocalRoundExecutor, RoundExecutor
from smc.executor.worker import ModelWorker
from smc.local_engine import ModelPair, local_engine
from smc.memory.kv_cache import KVPool
from smc.model.config import ModelConfig
from smc.model.decoder import Decoder, RopeTable
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
NEVER = -40.0
"""Logit of a token that is not offered."""
SURE = 40.0
"""Logit of the token that the target draws."""
EXPONENTS = tuple(np.geomspace(LEAST_EXPONENT, MOST_EXPONENT, 33).tolist())
PROMPT = 2
"""Tokens of a replay's prompt."""
TOGETHER = 64
"""Maximum number of nodes that the draft runs at once."""
MOST_NODES = 1 << 18
"""Maximum number of nodes whose keys and values are kept. Memory is taken when it is written."""
HIDDEN = 16


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
            found = self.add(node, place, int(self.offered[node][0][place]) if place < OFFERS else 0)
        return found

    def place_of_draw(self, node: int) -> int:
        """Return the place of the target's draw after a node of the answer."""
        return self.places[node + 1] if node < len(self.answer) else 0

    def path(self, node: int) -> list[int]:
        """Return the nodes from the first token of the answer to a node."""
        found = []
        while node:
            found.append(node)
            node = self.parents[node]
        return found[::-1]


class DraftReader:
    """Runs a draft at nodes of traces."""

    def __init__(self, draft: Decoder, vocab: int, longest: int, exponents: Mapping[float, float] | None = None):
        """`longest`: tokens of the longest text. `exponents`: those of temperatures that are known already."""
        self._draft, self._vocab, self._longest = draft, vocab, longest
        self._rope = RopeTable(draft.config, longest + 64, draft.embed.weight.device)
        self._attention = TorchAttention()
        self._pool = KVPool(draft.config, MOST_NODES, draft.embed.weight.dtype, "cpu")
        self._free = 1
        self._pages: dict[int, np.ndarray] = {}
        """Pages of the text of each trace."""
        self._answers: dict[int, int] = {}
        """Tokens of the answer of each trace."""
        self._own: dict[tuple[int, int], int] = {}
        """Page of each other node, by trace and node."""
        self.exponents = dict(exponents or {})
        self.nodes_run = 0

    def _take(self, count: int) -> np.ndarray:
        first, self._free = self._free, self._free + count
        if self._free > MOST_NODES:
            raise ValueError(f"the traces have more than {MOST_NODES} nodes; allowed: fewer or shorter answers")
        return np.arange(first, first + count)

    @torch.inference_mode()
    def read_answers(self, traces: Sequence[Trace], numbers: Sequence[int]) -> None:
        """Run the texts; fit the exponent of each temperature, and store the offers along the answers."""
        states: list[Tensor] = []
        for trace, number in zip(traces, numbers):
            pages = self._pages[number] = self._take(len(trace.text))
            self._answers[number] = len(trace.answer)
            hidden_TE = self._run(pages[None], np.array([0]), np.array([len(pages)]), torch.tensor(trace.text))
            states.append(hidden_TE[trace.answer_from - 1 :])
        for temperature in sorted({trace.temperature for trace in traces} - set(self.exponents)):
            self.exponents[temperature] = self._fitted(
                [(t, h) for t, h in zip(traces, states) if t.temperature == temperature]
            )
        for trace, hidden_TE in zip(traces, states):
            if not trace.parents:
                self._store_path(trace, hidden_TE)

    def _store_path(self, trace: Trace, hidden_TE: Tensor) -> None:
        trace.add(-1, -1, trace.text[trace.answer_from - 1])
        for node, token in enumerate((*trace.answer, None)):
            scores_V = self._scores(trace, node, self._logq(trace, hidden_TE[node : node + 1])[0])
            self._offer(trace, node, scores_V)
            if token is not None:
                found = np.flatnonzero(trace.offered[node][0] == token)
                trace.add(node, int(found[0]) if len(found) else OTHER, token)

    def _fitted(self, given: Sequence[tuple[Trace, Tensor]]) -> float:
        """Return the exponent with which the draft predicts the target's draws best, by `smc.algorithm.coupling`."""
        sums = np.zeros(len(EXPONENTS))
        for trace, hidden_TE in given:
            for node, token in enumerate(trace.answer):
                logq_V = self._logq(trace, hidden_TE[node : node + 1])[0]
                noise_V = self._noise(trace, node)
                for i, exponent in enumerate(EXPONENTS):
                    win = torch.log_softmax(exponent * logq_V + noise_V, -1)[token].exp().item()
                    sums[i] += np.log(win + SLACK)
        return EXPONENTS[int(sums.argmax())]

    @torch.inference_mode()
    def read(self, wanted: Sequence[tuple[int, Trace, int]]) -> None:
        """Store the offers of nodes, given with their traces and these traces' numbers. Nodes before them have been
        read."""
        for first in range(0, len(wanted), TOGETHER):
            part = wanted[first : first + TOGETHER]
            rows = []
            for number, trace, node in part:
                path = trace.path(node)
                page = self._own[number, node] = int(self._take(1)[0])
                before = [self._page(number, trace, each) for each in path[:-1]]
                rows.append([*self._pages[number][: trace.answer_from], *before, page])
            lengths = np.array([len(row) for row in rows])
            table_RL = np.zeros((len(rows), lengths.max()), dtype=np.int64)
            for row_L, row in zip(table_RL, rows):
                row_L[: len(row)] = row
            tokens = torch.tensor([trace.tokens[node] for _, trace, node in part])
            numbers = np.array([number for number, _, _ in part])
            hidden_YE = self._run(table_RL, lengths - 1, np.ones_like(lengths), tokens, numbers)
            at = [(number, len(trace.path(node))) for number, trace, node in part]
            logits_YV, noise = self._draft.logits(hidden_YE)[:, : self._vocab].float(), {}
            for where, (_, trace, node), logits_V in zip(at, part, logits_YV):
                if where not in noise:
                    noise[where] = self._noise(trace, where[1])
                # The normaliser of log q is that of the scores, too.
                scores_V = self.exponents[trace.temperature] / (trace.temperature or 1.0) * logits_V + noise[where]
                self._offer(trace, node, torch.log_softmax(scores_V, -1))
        self.nodes_run += len(wanted)

    def holds(self, number: int, node: int) -> bool:
        """Whether the keys and values of a node are known."""
        return (number, node) in self._own or self._is_answer(number, node)

    def _is_answer(self, number: int, node: int) -> bool:
        return node <= self._answers[number]

    def _page(self, number: int, trace: Trace, node: int) -> int:
        if self._is_answer(number, node):
            return int(self._pages[number][trace.answer_from + node - 1])
        return self._own[number, node]

    def _run(
        self,
        table_RL: np.ndarray,
        starts_R: np.ndarray,
        counts_R: np.ndarray,
        tokens_T: Tensor,
        number_R: np.ndarray | None = None,
    ) -> Tensor:
        """Run tokens of rows. `number`: traces of the rows, in ascending order; rows of a trace share its prompt."""
        rows = len(starts_R)
        row_T = np.repeat(np.arange(rows), counts_R)
        position_T = np.concatenate([np.arange(start, start + count) for start, count in zip(starts_R, counts_R)])
        bounds_U, shared_U = np.arange(rows + 1), np.zeros(rows, dtype=np.int64)
        if number_R is not None:
            first_U = np.flatnonzero(np.diff(number_R, prepend=-1))
            bounds_U = np.append(first_U, rows)
            # The first tokens of all texts, up to where the shortest sequence begins.
            shared_U = np.minimum.reduceat(starts_R, first_U)
            same = [int((table_RL[a:b] == table_RL[a]).all(0).argmin()) for a, b in itertools.pairwise(bounds_U)]
            shared_U = np.where(np.diff(bounds_U) > 1, np.minimum(shared_U, same), 0)
        batch = ForwardBatch(table_RL, starts_R, counts_R, table_RL[row_T, position_T], position_T, bounds_U, shared_U)
        attend = self._attention.plan(self._pool, batch).attend
        return self._draft(tokens_T, self._rope.at(torch.from_numpy(position_T)), attend)

    def _logq(self, trace: Trace, hidden_RE: Tensor) -> Tensor:
        return torch.log_softmax(
            self._draft.logits(hidden_RE)[:, : self._vocab].float() / (trace.temperature or 1.0), -1
        )

    def _noise(self, trace: Trace, depth: int) -> Tensor:
        """Return the noise [V] of the target's draw after `depth` tokens of the answer."""
        if not trace.temperature:
            return torch.zeros(self._vocab)
        position = np.array([trace.answer_from + depth], dtype=np.int64)
        return target_noise(np.array([trace.seed], dtype=np.int64), position, self._vocab, torch.device("cpu"))[0]

    def _scores(self, trace: Trace, depth: int, logq_V: Tensor) -> Tensor:
        return torch.log_softmax(self.exponents[trace.temperature] * logq_V + self._noise(trace, depth), -1)

    def _offer(self, trace: Trace, node: int, scores_V: Tensor) -> None:
        win_C, token_C = scores_V.topk(OFFERS)
        trace.offered[node] = token_C.int().numpy(), win_C.float().numpy()


class TraceLibrary:
    """Traces that an engine can replay."""

    def __init__(self, traces: Sequence[Trace], reader: DraftReader | None) -> None:
        """`reader`: runs the draft at nodes that no replay has asked about before. It has read the answers."""
        self.traces, self.reader = list(traces), reader
        self.exponents = dict(reader.exponents) if reader else {}
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
        found._numbers = [self._numbers[i] for i in index]
        return found

    def ask(self, wanted: Sequence[tuple[int, int]]) -> None:
        """Let the draft run these nodes, given as numbers of traces and nodes, where it has not yet."""
        missing = {each for each in wanted if each[1] not in self.traces[each[0]].offered}
        if not missing:
            return
        if self.reader is None:
            raise ValueError("the traces lack what a draft would offer here; allowed: to give the draft, too")
        left = set(missing)
        for number, node in missing:
            # Nodes that were read from a file have no keys and values here.
            path, known = self.traces[number].path(node), self._numbers[number]
            left |= {(number, each) for each in path if not self.reader.holds(known, each)}
        while left:
            ready = sorted(each for each in left if (each[0], self.traces[each[0]].parents[each[1]]) not in left)
            self.reader.read([(self._numbers[number], self.traces[number], node) for number, node in ready])
            left -= set(ready)

    def grow(self, width: int, depth: int) -> None:
        """Let the draft run likely nodes after every node of the answers, in large batches: at each depth the `width`
        likeliest. Replays ask for fewer nodes then, and a pass over few nodes takes as long as one over many."""
        heads = [
            [(0.0, number, node)] for number, trace in enumerate(self.traces) for node in range(len(trace.answer) + 1)
        ]
        for _ in range(depth):
            for i, nodes in enumerate(heads):
                wins = [self.traces[number].offered[node][1] for _, number, node in nodes]
                masses = np.concatenate([mass + win_C for (mass, _, _), win_C in zip(nodes, wins)])
                after = []
                for at in np.argsort(-masses, kind="stable")[: width + 1].tolist():
                    _, number, node = nodes[at // OFFERS]
                    trace, place = self.traces[number], at % OFFERS
                    child = trace.child(node, place)
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
                logits_V[:OFFERS] = trace.offered[node][1] / FIRST_GREEDY_EXPONENT
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

    def run_prompt(self, reader: Reader, tokens_T: Tensor, batch: ForwardBatch, output_T: Tensor) -> Tensor:
        return self._model(reader).run(tokens_T.numpy(), batch)[output_T]

    def prompt_logits(self, reader: Reader, hidden_RE: Tensor) -> Tensor:
        return self._model(reader).logits(hidden_RE)


def replay_engine(
    library: TraceLibrary, config: EngineConfig, executor: Callable[[RoundExecutor], RoundExecutor] = lambda it: it
) -> Engine:
    """Return an engine that replays traces. `executor`: wraps the executor of its rounds."""
    context = max(len(trace.answer) for trace in library.traces) + PROMPT + 1
    shape = ModelConfig(
        "llama", VOCAB, HIDDEN, 1, 1, 1, HIDDEN, HIDDEN, context + 64, 1e-5, 1e4, None, False, False, False
    )
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


def write_traces(
    pair: ModelPair, prompts: Sequence[tuple[str, Sequence[int]]], temperature: float, tokens: int, seed: int = 0
) -> list[Trace]:
    """Let the target answer prompts, given with their kind, all in one batch."""
    longest = max(len(prompt) for _, prompt in prompts) + tokens
    config = EngineConfig(form="lockstep", block=8, max_slots=len(prompts), max_context=longest, prefill_chunk=1 << 12)
    engine = local_engine(pair, config)
    requests = [
        Request(
            str(i),
            tuple(prompt),
            SamplingParams(method=Method.TARGET, temperature=temperature, max_tokens=tokens, seed=seed + i),
        )
        for i, (_, prompt) in enumerate(prompts)
    ]
    answers = {out.request_id: out.answer.tokens for out in engine.run(requests) if out.answer is not None}
    return [
        Trace((*request.prompt, *answers[request.request_id]), len(request.prompt), seed + i, temperature, subject)
        for i, (request, (subject, _)) in enumerate(zip(requests, prompts))
    ]


def save(library: TraceLibrary, path: Path) -> None:
    """Write traces to a file of NumPy arrays."""
    arrays: dict[str, Any] = {"exponents": np.array(sorted(library.exponents.items()))}
    for i, trace in enumerate(library.traces):
        nodes = sorted(trace.offered)
        arrays |= {
            f"{i} text": np.array(trace.text, np.int32),
            f"{i} facts": np.array([trace.answer_from, trace.seed, trace.temperature]),
            f"{i} subject": np.array(trace.subject),
            f"{i} nodes": np.array([trace.parents, trace.places, trace.tokens], np.int32),
            f"{i} offered": np.array(nodes, np.int32),
            f"{i} offers": np.stack([trace.offered[node][0] for node in nodes]),
            f"{i} wins": np.stack([trace.offered[node][1] for node in nodes]),
        }
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)


def load(path: Path, reader: DraftReader | None = None) -> TraceLibrary:
    """Read traces from a file. `reader`: as for `TraceLibrary`; it reads the answers now."""
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
            for node in zip(*arrays[f"{i} nodes"].tolist()):
                trace.add(*node)
            offers, wins = arrays[f"{i} offers"], arrays[f"{i} wins"]
            trace.offered = {node: (offers[k], wins[k]) for k, node in enumerate(arrays[f"{i} offered"].tolist())}
            traces.append(trace)
        library = TraceLibrary(traces, reader)
        library.exponents = dict(arrays["exponents"].tolist())
    return library
