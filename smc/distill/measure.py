"""How well a draft knows its target, on conversations that it does not learn from.

Axes: B rows, S token positions, X tokens of answers, C tokens of a chunk, V vocabulary."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smc.algorithm.coupling import FIRST_GREEDY_EXPONENT
from smc.calibration.latency import BRIEF, Effort, measure_latency
from smc.distill.losses import chunk_size
from smc.distill.trainer import parts_of
from smc.distill.trees import DrawnContinuation, OwnText, TreeDraft, draw_next
from smc.local_engine import ModelPair, local_engine
from smc.memory.kv_cache import pool_for
from smc.model.decoder import Decoder, RopeTable
from smc.model.dense import hidden_states
from smc.probe import CONFIG, expected_speed
from smc.scheduler.latency_model import LatencyModel

BLOCK = CONFIG.block
"""K of trees."""
ROWS = (1, 8)
"""N of trees."""
EXPONENT = 1.0
"""Of coupled drafting: what a draft like its target has. The engine fits it to the target's draws."""
TEXTS = 8
"""Whose trees grow together."""
GPU_EFFORT = Effort(4.0, 8, 3, 2, 8, 512)
MOST_TEXT_TEMPERATURE = 0.75
"""Trees are measured after contexts that were written at most so, where there are any: text that a small model wrote at
temperature 1 drifts to where both models are uncertain."""


@dataclass(frozen=True)
class TreeMeasurement:
    """Trees of `rows` rows and K tokens, with the target's draws at one temperature."""

    temperature: float
    rows: int
    held_by_depth: tuple[float, ...]
    """Share of contexts whose tree holds the first, the first two, .. of the target's next tokens."""
    speed: float | None
    """Expected speed of exact decoding, of one request in lockstep on this machine, as a multiple of the target's
    alone."""

    @property
    def held(self) -> float:
        """Tokens of K that the tree holds, on average."""
        return sum(self.held_by_depth)


@dataclass(frozen=True)
class Measurement:
    """A draft at one moment of its training."""

    seconds: float
    """Since the run began, without the time between a kill and its resumption."""
    step: int
    trained_tokens: int
    written_tokens: int
    overlap: float
    """Mean over answer tokens of sum min(p, q) at temperature 1."""
    kl: float
    """Nats a token, at temperature 1."""
    same_likeliest: float
    chi2: float
    """Mean of log(1 + chi-square), at temperature 1."""
    entropy: float
    """Of the target, nats a token."""
    positions: int
    contexts: int
    """After which trees were grown."""
    trees: tuple[TreeMeasurement, ...] = field(default=())

    def tree(self, temperature: float, rows: int) -> TreeMeasurement:
        return next(each for each in self.trees if (each.temperature, each.rows) == (temperature, rows))

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Measurement:
        """Inverse of `dataclasses.asdict`."""
        trees = tuple(
            TreeMeasurement(**{**each, "held_by_depth": tuple(each["held_by_depth"])}) for each in values["trees"]
        )
        return Measurement(**{**values, "trees": trees})

    def __str__(self) -> str:
        trees = "; ".join(
            f"T={each.temperature:g} N={each.rows} {each.held:.2f}"
            + (f" ({each.speed:.2f}x)" if each.speed is not None else "")
            for each in self.trees
        )
        return f"overlap {self.overlap:.4f}, KL {self.kl:.3f}, same likeliest {self.same_likeliest:.3f}; trees of {BLOCK}: {trees}"


class HeldOut:
    """Conversations that are measured on."""

    def __init__(self, rows_N: np.ndarray, temperatures: Sequence[float], contexts: int, seed: int) -> None:
        """`rows`: of a `ConversationStore`; `contexts`: after how many trees are grown, about."""
        self._rows_N, self._temperatures, self._seed = rows_N, temperatures, seed
        calm_N = rows_N[(rows_N["temperature"] <= MOST_TEXT_TEMPERATURE) & (rows_N["temperature"] > 0)]
        texts = sorted(
            (_first_answer(row) for row in (calm_N if len(calm_N) else rows_N)), key=lambda text: len(text.tokens)
        )
        answer_tokens = sum(len(text.tokens) - text.answer_from for text in texts)
        self._distance = max(1, answer_tokens // contexts)
        with_contexts = [text for text in texts if text.contexts(self._distance)]
        self._groups = [with_contexts[i : i + TEXTS] for i in range(0, len(with_contexts), TEXTS)]
        """Texts of similar length, whose trees grow together."""
        self._drawn: dict[float, list[list[list[DrawnContinuation]]]] = {}
        """By temperature, group and text: what the target draws after its contexts."""

    def measure(
        self,
        target: Decoder,
        draft: Decoder,
        vocab: int,
        costs: LatencyModel | None,
        **when: Any,
    ) -> Measurement:
        """`when`: the first fields of a `Measurement`."""
        values_5 = torch.zeros(5, dtype=torch.float64)
        positions = 0
        for values_X5 in self._compare(target, draft, vocab):
            values_5 += values_X5.double().sum(0).cpu()
            positions += len(values_X5)
        overlap, kl, same, chi2, entropy = (values_5 / max(1, positions)).tolist()
        trees, contexts = self._trees(target, draft, vocab, costs)
        return Measurement(
            **when,
            overlap=overlap,
            kl=kl,
            same_likeliest=same,
            chi2=chi2,
            entropy=entropy,
            positions=positions,
            contexts=contexts,
            trees=trees,
        )

    @torch.no_grad()
    def _compare(self, target: Decoder, draft: Decoder, vocab: int) -> Iterator[Tensor]:
        device = target.embed.weight.device
        size = chunk_size(vocab, device.type)
        for tokens_BS, index_X in parts_of(self._rows_N, device):
            p_hidden_XE, q_hidden_XE = (
                hidden_states(model, RopeTable(model.config, tokens_BS.shape[1], device).table, tokens_BS).flatten(
                    0, 1
                )[index_X]
                for model in (target, draft)
            )
            for p_hidden_CE, q_hidden_CE in zip(p_hidden_XE.split(size), q_hidden_XE.split(size)):
                logp_CV = torch.log_softmax(target.logits(p_hidden_CE)[:, :vocab], -1)
                logq_CV = torch.log_softmax(draft.logits(q_hidden_CE)[:, :vocab], -1)
                p_CV, q_CV = logp_CV.exp(), logq_CV.exp()
                yield torch.stack(
                    (
                        torch.minimum(p_CV, q_CV).sum(-1),
                        torch.where(p_CV > 0, p_CV * (logp_CV - logq_CV), 0.0).sum(-1),
                        (logp_CV.argmax(-1) == logq_CV.argmax(-1)).float(),
                        torch.logsumexp(2 * logp_CV - logq_CV, -1),
                        -torch.where(p_CV > 0, p_CV * logp_CV, 0.0).sum(-1),
                    ),
                    1,
                )

    def _trees(
        self, target: Decoder, draft: Decoder, vocab: int, costs: LatencyModel | None
    ) -> tuple[tuple[TreeMeasurement, ...], int]:
        held: dict[tuple[float, int], list[int]] = {(t, rows): [] for t in self._temperatures for rows in ROWS}
        for temperature in self._temperatures:
            exponent = EXPONENT if temperature else FIRST_GREEDY_EXPONENT
            trees = {rows: TreeDraft(draft, vocab, rows, exponent) for rows in ROWS}
            if temperature not in self._drawn:
                self._drawn[temperature] = list(self._draws(target, temperature, vocab))
            for texts, drawn in zip(self._groups, self._drawn[temperature]):
                for rows, tree in trees.items():
                    for counts in tree.held(texts, drawn, temperature):
                        held[temperature, rows] += counts
        found = tuple(
            _tree_measurement(temperature, rows, np.array(counts), costs)
            for (temperature, rows), counts in held.items()
            if counts
        )
        return found, max(map(len, held.values()), default=0)

    def _draws(self, target: Decoder, temperature: float, vocab: int) -> Iterator[list[list[DrawnContinuation]]]:
        seed = self._seed
        for texts in self._groups:
            contexts = [text.contexts(self._distance) for text in texts]
            yield draw_next(target, texts, contexts, BLOCK, temperature, seed, vocab)
            seed += sum(map(len, contexts))


def _tree_measurement(temperature: float, rows: int, held_C: np.ndarray, costs: LatencyModel | None) -> TreeMeasurement:
    by_depth = tuple(float((held_C > depth).mean()) for depth in range(BLOCK))
    speed = None if costs is None else expected_speed(costs, 1 + sum(by_depth), rows)
    return TreeMeasurement(temperature, rows, by_depth, speed)


def _first_answer(row: np.void) -> OwnText:
    """The conversation up to the end of its first answer."""
    is_answer = row["is_answer"][: row["length"]]
    begin = int(is_answer.argmax())
    after = np.flatnonzero(~is_answer[begin:])
    end = begin + int(after[0]) if len(after) else len(is_answer)
    return OwnText(tuple(row["tokens"][:end].tolist()), begin)


def pair_costs(pair: ModelPair) -> LatencyModel | None:
    """What steps and passes of this pair take on this machine. None if there is no memory for measuring, or if contexts
    are too short."""
    slots, on_gpu = max(ROWS), pair.target.embed.weight.is_cuda
    config = replace(CONFIG, max_slots=slots, pages=pool_for(slots * 640))
    try:
        return measure_latency(local_engine(pair, config), GPU_EFFORT if on_gpu else BRIEF)
    except torch.OutOfMemoryError:
        return None
    finally:
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
