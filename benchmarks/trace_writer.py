"""Writes traces (`benchmarks.traces`): the answers come from the target, the offers from the draft. Both models run in
plain torch, on a CPU or a GPU. It knows nothing about engines and rounds.

Local axes: U segments of rows with a common prefix, or draws of the target, Y nodes that are run at once, Z texts. C
are the offers of a node."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from benchmarks.traces import OFFERS, OTHER, NodeReader, Trace
from smc.algorithm.coupling import LEAST_EXPONENT, MOST_EXPONENT, SLACK
from smc.arrays import offsets, to_device
from smc.attention.backend import ForwardBatch, TorchAttention
from smc.distill.measure import target_noise
from smc.local_engine import ModelPair
from smc.memory.kv_cache import KVPool
from smc.model.decoder import Decoder, RopeTable

EXPONENTS = tuple(np.geomspace(LEAST_EXPONENT, MOST_EXPONENT, 33).tolist())
TOGETHER = {"cpu": 64, "cuda": 2048}
"""Maximum number of nodes that the draft runs at once."""
MOST_NODES = {"cpu": 1 << 18, "cuda": 1 << 20}
"""Maximum number of nodes whose keys and values are kept. A CPU's memory is taken when it is written."""


class PagedModel:
    """A model with a pool of pages, of which none is freed."""

    def __init__(self, model: Decoder, longest: int, pages: int) -> None:
        """`longest`: tokens of the longest text."""
        self.model, self.device = model, model.embed.weight.device
        self._rope = RopeTable(model.config, longest + 64, self.device)
        self._attention = TorchAttention()
        self._pool = KVPool(model.config, pages, model.embed.weight.dtype, self.device)
        self._pages, self._free = pages, 1

    def take(self, count: int) -> np.ndarray:
        """Return new pages."""
        first, self._free = self._free, self._free + count
        if self._free > self._pages + 1:
            raise ValueError(f"the traces have more than {self._pages} nodes; allowed: fewer or shorter answers")
        return np.arange(first, first + count)

    def run(
        self,
        table_RL: np.ndarray,
        starts_R: np.ndarray,
        counts_R: np.ndarray,
        tokens_T: np.ndarray,
        number_R: np.ndarray | None = None,
    ) -> Tensor:
        """Run tokens of rows. Returns hidden states [T, E]. `number`: traces of the rows, in ascending order; rows of a
        trace share its prompt."""
        rows = len(starts_R)
        row_T = np.repeat(np.arange(rows), counts_R)
        position_T = starts_R[row_T] + offsets(counts_R)
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
        return self.model(to_device(tokens_T, self.device), self._rope.at(to_device(position_T, self.device)), attend)


@torch.inference_mode()
def write_traces(
    pair: ModelPair, prompts: Sequence[tuple[str, Sequence[int]]], temperature: float, tokens: int, seed: int = 0
) -> list[Trace]:
    """Let the target answer prompts, given with their kind, all in one batch: what the engine answers to a request with
    seed `seed` + i, apart from rounding."""
    vocab, longest = pair.tokenizer.size, max(len(prompt) for _, prompt in prompts) + tokens
    target = PagedModel(pair.target, longest, len(prompts) * longest)
    table_ZL = target.take(len(prompts) * longest).reshape(len(prompts), longest)
    answers: list[list[int]] = [[] for _ in prompts]
    length_Z = np.array([len(prompt) for _, prompt in prompts])
    left_Z = np.arange(len(prompts))
    hidden_TE = target.run(table_ZL, 0 * length_Z, length_Z, np.concatenate([prompt for _, prompt in prompts]))
    hidden_ZE = hidden_TE[to_device(np.cumsum(length_Z) - 1, target.device)]
    for depth in range(tokens):
        logits_ZV = pair.target.logits(hidden_ZE)[:, :vocab].float()
        if temperature:
            noise_ZV = target_noise(seed + left_Z, length_Z[left_Z] + depth, vocab, target.device)
            logits_ZV = logits_ZV / temperature + noise_ZV
        drawn_Z = logits_ZV.argmax(-1).cpu().numpy()
        for i, token in zip(left_Z.tolist(), drawn_Z.tolist()):
            answers[i].append(token)
        goes_on_Z = ~np.isin(drawn_Z, pair.tokenizer.eos_ids)
        left_Z, drawn_Z = left_Z[goes_on_Z], drawn_Z[goes_on_Z]
        if depth + 1 == tokens or not len(left_Z):
            break
        hidden_ZE = target.run(table_ZL[left_Z], length_Z[left_Z] + depth, np.ones_like(left_Z), drawn_Z)
    return [
        Trace((*prompt, *answer), len(prompt), seed + i, temperature, subject)
        for i, ((subject, prompt), answer) in enumerate(zip(prompts, answers))
    ]


class DraftReader(NodeReader):
    """Runs a draft at nodes of traces."""

    def __init__(self, draft: Decoder, vocab: int, longest: int, exponents: Mapping[float, float] | None = None):
        """`longest`: tokens of the longest text. `exponents`: those of temperatures that are known already."""
        kind = draft.embed.weight.device.type
        self._draft, self._vocab = PagedModel(draft, longest, MOST_NODES[kind]), vocab
        self._together = TOGETHER[kind]
        self._pages: dict[int, np.ndarray] = {}
        """Pages of the text of each trace."""
        self._own: dict[tuple[int, int], int] = {}
        """Page of each other node, by trace and node."""
        self.exponents = dict(exponents or {})
        self.nodes_run = 0

    @torch.inference_mode()
    def read_answers(self, traces: Sequence[Trace], numbers: Sequence[int]) -> None:
        """Run the texts; fit the exponent of each temperature, and store the offers along the answers."""
        states: list[Tensor] = []
        for trace, number in zip(traces, numbers):
            pages = self._pages[number] = self._draft.take(len(trace.text))
            hidden_TE = self._draft.run(pages[None], np.array([0]), np.array([len(pages)]), np.array(trace.text))
            states.append(hidden_TE[trace.answer_from - 1 :].clone())
        for temperature in sorted({trace.temperature for trace in traces} - set(self.exponents)):
            self.exponents[temperature] = self._fitted(
                [(t, h) for t, h in zip(traces, states) if t.temperature == temperature]
            )
        for trace, hidden_TE in zip(traces, states):
            if not trace.parents:
                self._store_path(trace, hidden_TE)

    def _store_path(self, trace: Trace, hidden_TE: Tensor) -> None:
        scores_TV = self.exponents[trace.temperature] * self._logq(trace, hidden_TE)
        noise_TV = self._noise([(trace, depth) for depth in range(len(hidden_TE))])
        offers = self._offers(scores_TV if noise_TV is None else scores_TV + noise_TV)
        trace.add(-1, -1, trace.text[trace.answer_from - 1])
        for node, (offered, token) in enumerate(zip(offers, (*trace.answer, None), strict=True)):
            trace.offered[node] = offered
            if token is not None:
                found = np.flatnonzero(offered[0] == token)
                trace.add(node, int(found[0]) if len(found) else OTHER, token)

    def _fitted(self, given: Sequence[tuple[Trace, Tensor]]) -> float:
        """Return the exponent with which the draft predicts the target's draws best, by `smc.algorithm.coupling`."""
        sums = np.zeros(len(EXPONENTS))
        for trace, hidden_TE in given:
            logq_TV = self._logq(trace, hidden_TE[:-1])
            noise_TV = self._noise([(trace, depth) for depth in range(len(logq_TV))])
            token_T1 = torch.tensor(trace.answer, device=logq_TV.device)[:, None]
            for i, exponent in enumerate(EXPONENTS):
                scores_TV = exponent * logq_TV if noise_TV is None else exponent * logq_TV + noise_TV
                win_T = torch.log_softmax(scores_TV, -1).gather(1, token_T1)[:, 0].exp()
                sums[i] += (win_T + SLACK).log().sum().item()
        return EXPONENTS[int(sums.argmax())]

    @torch.inference_mode()
    def read(self, wanted: Sequence[tuple[int, Trace, int]]) -> None:
        for first in range(0, len(wanted), self._together):
            part = wanted[first : first + self._together]
            rows = [self._row(number, trace, node) for number, trace, node in part]
            lengths = np.array([len(row) for row in rows])
            table_RL = np.zeros((len(rows), lengths.max()), dtype=np.int64)
            for row_L, row in zip(table_RL, rows):
                row_L[: len(row)] = row
            # What follows a token that the draft does not offer is unlikely: any token will do in its place.
            tokens = np.array([max(0, trace.tokens[node]) for _, trace, node in part])
            numbers = np.array([number for number, _, _ in part])
            hidden_YE = self._draft.run(table_RL, lengths - 1, np.ones_like(lengths), tokens, numbers)
            power_Y = [self.exponents[trace.temperature] / (trace.temperature or 1.0) for _, trace, _ in part]
            # The normaliser of log q is that of the scores, too.
            scores_YV = self._draft.model.logits(hidden_YE)[:, : self._vocab].float()
            scores_YV *= torch.tensor(power_Y, device=scores_YV.device)[:, None]
            depths = [(trace, len(row) - trace.answer_from) for row, (_, trace, _) in zip(rows, part)]
            noise_YV = self._noise(depths)
            for (_, trace, node), offered in zip(
                part, self._offers(scores_YV if noise_YV is None else scores_YV + noise_YV)
            ):
                trace.offered[node] = offered
        self.nodes_run += len(wanted)

    def _row(self, number: int, trace: Trace, node: int) -> np.ndarray:
        """Return the pages of all tokens up to a node, with a new one for the node."""
        page = self._own[number, node] = int(self._draft.take(1)[0])
        branched, *off = trace.branch(node)
        before = [self._own[number, each] for each in off[:-1]]
        return np.concatenate((self._pages[number][: trace.answer_from + branched], before, [page])).astype(np.int64)

    def holds(self, number: int, trace: Trace, node: int) -> bool:
        return (number, node) in self._own or node <= len(trace.answer)

    def _logq(self, trace: Trace, hidden_RE: Tensor) -> Tensor:
        return torch.log_softmax(
            self._draft.model.logits(hidden_RE)[:, : self._vocab].float() / (trace.temperature or 1.0), -1
        )

    def _noise(self, at: Sequence[tuple[Trace, int]]) -> Tensor | None:
        """Return the noise [Y, V] of the target's draws after these numbers of tokens of answers; None: there is
        none."""
        keys = [(trace.seed, trace.answer_from + depth) if trace.temperature else (0, -1) for trace, depth in at]
        index = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        if set(index) == {(0, -1)}:
            return None
        seed_U, position_U = np.array(list(index), dtype=np.int64).T
        noise_UV = target_noise(seed_U, np.maximum(position_U, 0), self._vocab, self._draft.device)
        noise_UV[torch.from_numpy(position_U < 0).to(self._draft.device)] = 0.0
        return noise_UV if len(index) == len(keys) else noise_UV[[index[key] for key in keys]]

    @staticmethod
    def _offers(scores_YV: Tensor) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return tokens [C] and log-probabilities [C] of each node's offers."""
        score_YC, token_YC = scores_YV.topk(OFFERS)
        win_YC = score_YC - scores_YV.logsumexp(-1, keepdim=True)
        return list(zip(token_YC.int().cpu().numpy(), win_YC.float().cpu().numpy()))
