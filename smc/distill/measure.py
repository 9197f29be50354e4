"""Measures how well a draft predicts its target on held-out conversations: the overlap of their distributions, and how
many of the target's next tokens the draft's tree holds. Writes the results of a run beside the draft's weights: a card,
the numbers as JSON, and a picture.

At each context the target draws its next tokens. The draft grows a tree as in a round of exact decoding in lockstep,
and the target's tokens are looked up in this tree. Every node counts that a step has kept, even if a later step keeps
none of its continuations. The engine verifies only rows of full depth, so it confirms fewer tokens than the tree holds.
The contexts of several texts are continued together; their rows read the keys of their text up to the end of their
context.

Local axes: P continuations of a context, U contexts or tokens that are measured at once, Y = U * F rows of trees, Z
conversations."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from smc.algorithm.coupling import FIRST_GREEDY_EXPONENT, coupled_logp
from smc.calibration.latency import BRIEF, Effort, measure_latency
from smc.distill.trainer import LOSSES, answer_states, chunk_size, parts_of
from smc.draft_step import free_memory
from smc.local_engine import ModelPair, local_engine
from smc.memory.kv_cache import pool_for
from smc.model.decoder import Decoder, RopeTable, attend_causally
from smc.model.files import write_json
from smc.philox import Purpose, exponentials, words
from smc.probe import CONFIG, expected_speed
from smc.scheduler.speculation import LatencyModel
from smc.terminal import finite

BLOCK = CONFIG.block
"""Tokens of a row of the trees (K)."""
ROWS = (1, 8)
"""Numbers of rows of the trees (N)."""
EXPONENT = 1.0
"""Exponent of coupled drafting: 1 suits a draft that equals its target. The engine fits the exponent to the target's
draws."""
TEXTS = 8
"""Number of texts whose trees grow together."""
GPU_EFFORT = Effort(4.0, 8, 3, 2, 8, 512)
MOST_TEXT_TEMPERATURE = 0.75
"""Trees are grown in texts that were written at most at this temperature and not greedily, if there are any: text that
a small model wrote at temperature 1 drifts to where both models are uncertain."""
COMPARED = ("overlap", "kl", "same_likeliest", "chi2", "entropy")
"""Fields of a `Measurement` that are means over answer tokens."""
CARD, RECORD, PICTURE = "README.md", "distill.json", "distill.png"


@dataclass(frozen=True)
class OwnText:
    """A conversation that the target wrote."""

    tokens: tuple[int, ...]
    answer_from: int
    """Index of the answer's first token."""

    def contexts(self, distance: int) -> list[Context]:
        """Return contexts that end within the answer, `distance` tokens apart."""
        return [Context(self, size) for size in range(self.answer_from + 1, len(self.tokens), distance)]


class Context(NamedTuple):
    """The beginning of a text."""

    text: OwnText
    size: int
    """Number of its tokens."""


@dataclass(frozen=True)
class DrawnContinuation:
    """The tokens that the target draws after a context."""

    context: Context
    tokens: tuple[int, ...]
    seed: int


def target_noise(seed_U: np.ndarray, position_U: np.ndarray, vocab: int, device: torch.device) -> Tensor:
    """Return the Gumbel noise [U, V] of the target's draws at these positions. `seed_U`, `position_U`: int64."""
    zero_U = np.zeros_like(seed_U)
    word0_U, word1_U, _, _ = map(torch.from_numpy, words(seed_U, zero_U, zero_U, position_U, Purpose.TARGET))
    return -exponentials(word0_U.to(device), word1_U.to(device), vocab).log()


class TextRows:
    """Rows that continue contexts of texts through a model. All U contexts have the same number of rows."""

    def __init__(self, model: Decoder, contexts: Sequence[Context], further: int) -> None:
        """Run the model over the texts. `further`: number of tokens by which rows grow."""
        device, texts = model.embed.weight.device, list(dict.fromkeys(each.text for each in contexts))
        self._text_U = torch.tensor([texts.index(each.text) for each in contexts], device=device)
        self._context_U = torch.tensor([each.size for each in contexts], device=device)
        self._text: list[tuple[Tensor, Tensor]] = []
        self._own: list[tuple[Tensor, Tensor] | None] = [None] * model.config.num_layers
        self._size = max(len(text.tokens) for text in texts)
        self._model, self._rope = model, RopeTable(model.config, self._size + further, device)
        # Padded on the right, where no context reads.
        tokens_RL = torch.tensor([[*text.tokens, *[0] * (self._size - len(text.tokens))] for text in texts])
        positions_T = torch.arange(self._size, device=device).repeat(len(texts))
        hidden_TE = model(tokens_RL.flatten().to(device), self._rope.at(positions_T), self._attend_causally)
        self.hidden = hidden_TE[self._text_U * self._size + self._context_U - 1]
        """Hidden states [Y, E] of every row's last token; at first there is one row for each context."""
        self._depth = 0

    def step(self, parent_Y: Tensor, tokens_Y: Tensor) -> None:
        """Replace the rows by continuations: new row y is row `parent_Y[y]` with the token `tokens_Y[y]` added."""
        rows = len(tokens_Y) // len(self._context_U)
        self._text_Y, self._context_Y = (each_U.repeat_interleave(rows) for each_U in (self._text_U, self._context_U))
        self._own = [None if one is None else (one[0][parent_Y], one[1][parent_Y]) for one in self._own]
        positions_Y = self._context_Y + self._depth
        self._depth += 1
        self.hidden = self._model(tokens_Y, self._rope.at(positions_Y), self._attend_rows)

    def _attend_causally(self, layer: int, q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (-1, self._size)).transpose(1, 2) for x in (q_THD, k_TJD, v_TJD))
        self._text.append((k, v))
        return attend_causally(q, k, v, self._model.config.window_of(layer))

    def _attend_rows(self, layer: int, q_YHD: Tensor, k_YJD: Tensor, v_YJD: Tensor) -> Tensor:
        own, (k_RJLD, v_RJLD) = self._own[layer], self._text[layer]
        k_YJKD, v_YJKD = k_YJD[:, :, None], v_YJD[:, :, None]
        if own is not None:
            k_YJKD, v_YJKD = torch.cat((own[0], k_YJKD), 2), torch.cat((own[1], v_YJKD), 2)
        self._own[layer] = k_YJKD, v_YJKD
        size, depth = self._size, k_YJKD.shape[2]
        k, v = (torch.cat((text[self._text_Y], mine), 2) for text, mine in ((k_RJLD, k_YJKD), (v_RJLD, v_YJKD)))
        at_L = torch.arange(size + depth, device=q_YHD.device)
        is_text_L, context_Y1 = at_L < size, self._context_Y[:, None]
        position_YL = torch.where(is_text_L, at_L, context_Y1 + at_L - size)
        window = self._model.config.window_of(layer) or size + depth
        seen_YL = (~is_text_L | (at_L < context_Y1)) & (position_YL > context_Y1 + depth - 1 - window)
        return F.scaled_dot_product_attention(q_YHD[:, :, None], k, v, seen_YL[:, None, None], enable_gqa=True)[:, :, 0]


@torch.no_grad()
def draw_next(
    target: Decoder, contexts: Sequence[Context], block: int, temperature: float, seed: int, vocab: int
) -> list[DrawnContinuation]:
    """Draw the target's next `block` tokens after each context, as plain decoding does. Context c has the seed `seed` +
    c."""
    rows, drawn, device = TextRows(target, contexts, block), [], target.embed.weight.device
    seed_U, position_U = seed + np.arange(len(contexts)), np.array([each.size for each in contexts], dtype=np.int64)
    own_U = torch.arange(len(contexts), device=device)
    for depth in range(block):
        logp_UV = torch.log_softmax(target.logits(rows.hidden)[:, :vocab] / (temperature or 1.0), -1)
        if temperature:
            logp_UV = logp_UV + target_noise(seed_U, position_U + depth, vocab, device)
        drawn.append(logp_UV.argmax(-1))
        if depth + 1 < block:
            rows.step(own_U, drawn[-1])
    tokens_UK = torch.stack(drawn, 1).tolist()
    drawn_U = enumerate(zip(contexts, tokens_UK))
    return [DrawnContinuation(context, tuple(tokens), seed + c) for c, (context, tokens) in drawn_U]


class TreeDraft:
    """Grows trees of `rows` rows after contexts, scored as in coupled drafting."""

    def __init__(self, draft: Decoder, vocab: int, rows: int, exponent: float) -> None:
        self._draft, self._vocab, self._rows, self._exponent = draft, vocab, rows, exponent

    @torch.no_grad()
    def held(self, drawn: Sequence[DrawnContinuation], temperature: float) -> list[int]:
        """Return, for each continuation, how many of its tokens the tree of its context holds."""
        if not drawn:
            return []
        device, count = self._draft.embed.weight.device, len(drawn)
        drawn_UK = torch.tensor([each.tokens for each in drawn], device=device)
        tree = TextRows(self._draft, [each.context for each in drawn], drawn_UK.shape[1])
        seed_U = np.array([each.seed for each in drawn])
        position_U = np.array([each.context.size for each in drawn], dtype=np.int64)
        score_UF = torch.zeros(count, 1, device=device)
        is_drawn_UF = torch.ones(count, 1, dtype=torch.bool, device=device)
        held_U = torch.zeros(count, dtype=torch.int64, device=device)
        for depth in range(drawn_UK.shape[1]):
            noise_UV = target_noise(seed_U, position_U + depth, self._vocab, device) if temperature else None
            score_UP = self._scores(tree.hidden, score_UF, noise_UV, temperature).flatten(1)
            score_UF, best_UF = score_UP.topk(min(self._rows, score_UP.shape[1]))
            parent_UF, token_UF = best_UF // self._vocab, best_UF % self._vocab
            is_drawn_UF = is_drawn_UF.gather(1, parent_UF) & (token_UF == drawn_UK[:, depth, None])
            held_U += is_drawn_UF.any(1)
            before = tree.hidden.shape[0] // count
            first_U1 = torch.arange(count, device=device)[:, None] * before
            if depth + 1 < drawn_UK.shape[1]:
                tree.step((first_U1 + parent_UF).flatten(), token_UF.flatten())
        return held_U.tolist()

    def _scores(self, hidden_YE: Tensor, score_UF: Tensor, noise_UV: Tensor | None, temperature: float) -> Tensor:
        """Return the log-probability [U, R, V], as the draft sees it, that the target draws a row's tokens and then
        each token."""
        logq_YV = torch.log_softmax(self._draft.logits(hidden_YE)[:, : self._vocab] / (temperature or 1.0), -1)
        exponent_Y = torch.full((len(logq_YV),), self._exponent, device=logq_YV.device)
        rows = score_UF.shape[1]
        noise_YV = torch.zeros_like(logq_YV) if noise_UV is None else noise_UV.repeat_interleave(rows, 0)
        won_YV = coupled_logp(logq_YV, exponent_Y, noise_YV)
        return score_UF[:, :, None] + won_YV.unflatten(0, (-1, rows))


@dataclass(frozen=True)
class TreeMeasurement:
    """Results for trees of `rows` rows and K tokens, with the target's draws at one temperature."""

    temperature: float
    rows: int
    held_by_depth: tuple[float, ...]
    """Share of contexts whose tree holds the first, the first two, .. of the target's next tokens."""
    speed: float | None
    """Expected speed of exact decoding of one request in lockstep on this machine, as a multiple of the target's alone;
    None if no times were measured."""

    @property
    def held(self) -> float:
        """Mean number of the K tokens that the tree holds."""
        return sum(self.held_by_depth)


@dataclass(frozen=True)
class Measurement:
    """Measurements of a draft at one moment of its training."""

    seconds: float
    """Seconds since the run began, without the time between a kill and its resumption."""
    step: int
    trained_tokens: int
    written_tokens: int
    overlap: float
    """Mean over answer tokens of sum min(p, q) at temperature 1."""
    kl: float
    """KL divergence from the target, nats a token, at temperature 1."""
    same_likeliest: float
    chi2: float
    """Mean of log(1 + chi-square), at temperature 1."""
    entropy: float
    """Entropy of the target, nats a token."""
    positions: int
    contexts: int
    """Number of contexts after which trees were grown, at each temperature."""
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
        found = f"overlap {self.overlap:.4f}, KL {self.kl:.3f}, same likeliest {self.same_likeliest:.3f}"
        return f"{found}; trees of {BLOCK}: {trees}"


class HeldOut:
    """Held-out conversations, on which a draft is measured."""

    def __init__(self, rows_Z: np.ndarray, temperatures: Sequence[float], contexts: int, seed: int) -> None:
        """`rows_Z`: rows of a `ConversationStore`. `contexts`: approximate number of contexts after which trees are
        grown."""
        self._rows_Z, self._temperatures, self._seed = rows_Z, temperatures, seed
        calm_Z = rows_Z[(rows_Z["temperature"] <= MOST_TEXT_TEMPERATURE) & (rows_Z["temperature"] > 0)]
        texts = sorted(
            (_first_answer(row) for row in (calm_Z if len(calm_Z) else rows_Z)), key=lambda text: len(text.tokens)
        )
        answer_tokens = sum(len(text.tokens) - text.answer_from for text in texts)
        distance = max(1, answer_tokens // contexts)
        of_texts = [found for text in texts if (found := text.contexts(distance))]
        self._groups = [list(chain(*of_texts[i : i + TEXTS])) for i in range(0, len(of_texts), TEXTS)]
        """Contexts of texts of similar length, whose trees grow together."""
        self._drawn: dict[float, list[list[DrawnContinuation]]] = {}
        """Continuations that the target draws after contexts, by temperature and group."""

    def measure(
        self,
        target: Decoder,
        draft: Decoder,
        vocab: int,
        latency: LatencyModel | None,
        **when: Any,
    ) -> Measurement:
        """Measure a draft. Without `latency`, expected speeds are None. `when`: the fields of a `Measurement` before
        `overlap`."""
        values_5 = torch.zeros(5, dtype=torch.float64)
        positions = 0
        for values_T5 in self._compare(target, draft, vocab):
            values_5 += values_T5.double().sum(0).cpu()
            positions += len(values_T5)
        means = dict(zip(COMPARED, (values_5 / max(1, positions)).tolist(), strict=True))
        trees, contexts = self._trees(target, draft, vocab, latency)
        return Measurement(**when, **means, positions=positions, contexts=contexts, trees=trees)

    @torch.no_grad()
    def _compare(self, target: Decoder, draft: Decoder, vocab: int) -> Iterator[Tensor]:
        """Yield `COMPARED` at the answer tokens, [T, 5]."""
        device = target.embed.weight.device
        size = chunk_size(vocab, device.type)
        for tokens_RL, index_T in parts_of(self._rows_Z, device):
            p_hidden_TE, q_hidden_TE = (answer_states(model, tokens_RL, index_T) for model in (target, draft))
            for p_hidden_UE, q_hidden_UE in zip(p_hidden_TE.split(size), q_hidden_TE.split(size)):
                logp_UV = torch.log_softmax(target.logits(p_hidden_UE)[:, :vocab], -1)
                logq_UV = torch.log_softmax(draft.logits(q_hidden_UE)[:, :vocab], -1)
                p_UV, q_UV = logp_UV.exp(), logq_UV.exp()
                yield torch.stack(
                    (
                        torch.minimum(p_UV, q_UV).sum(-1),
                        torch.where(p_UV > 0, p_UV * (logp_UV - logq_UV), 0.0).sum(-1),
                        (logp_UV.argmax(-1) == logq_UV.argmax(-1)).float(),
                        torch.logsumexp(2 * logp_UV - logq_UV, -1),
                        -torch.where(p_UV > 0, p_UV * logp_UV, 0.0).sum(-1),
                    ),
                    1,
                )

    def _trees(
        self, target: Decoder, draft: Decoder, vocab: int, latency: LatencyModel | None
    ) -> tuple[tuple[TreeMeasurement, ...], int]:
        held: dict[tuple[float, int], list[int]] = {(t, rows): [] for t in self._temperatures for rows in ROWS}
        for temperature in self._temperatures:
            exponent = EXPONENT if temperature else FIRST_GREEDY_EXPONENT
            trees = {rows: TreeDraft(draft, vocab, rows, exponent) for rows in ROWS}
            if temperature not in self._drawn:
                self._drawn[temperature] = list(self._draws(target, temperature, vocab))
            for drawn in self._drawn[temperature]:
                for rows, tree in trees.items():
                    held[temperature, rows] += tree.held(drawn, temperature)
        found = tuple(
            _tree_measurement(temperature, rows, np.array(counts), latency)
            for (temperature, rows), counts in held.items()
            if counts
        )
        return found, max(map(len, held.values()), default=0)

    def _draws(self, target: Decoder, temperature: float, vocab: int) -> Iterator[list[DrawnContinuation]]:
        seed = self._seed
        for contexts in self._groups:
            yield draw_next(target, contexts, BLOCK, temperature, seed, vocab)
            seed += len(contexts)


def _tree_measurement(
    temperature: float, rows: int, held_U: np.ndarray, latency: LatencyModel | None
) -> TreeMeasurement:
    by_depth = tuple(float((held_U > depth).mean()) for depth in range(BLOCK))
    speed = None if latency is None else expected_speed(latency, 1 + sum(by_depth), rows)
    return TreeMeasurement(temperature, rows, by_depth, speed)


def _first_answer(row: np.void) -> OwnText:
    """Return the conversation up to the end of its first answer."""
    is_answer = row["is_answer"][: row["length"]]
    begin = int(is_answer.argmax())
    after = np.flatnonzero(~is_answer[begin:])
    end = begin + int(after[0]) if len(after) else len(is_answer)
    return OwnText(tuple(row["tokens"][:end].tolist()), begin)


def pair_latency(pair: ModelPair) -> LatencyModel | None:
    """Measure how long steps and passes of this pair take on this machine. None if there is no memory for measuring, or
    if contexts are too short."""
    slots, device = max(ROWS), pair.target.embed.weight.device
    config = replace(CONFIG, max_slots=slots, pages=pool_for(slots * 640))
    try:
        return measure_latency(local_engine(pair, config), GPU_EFFORT if device.type == "cuda" else BRIEF)
    except torch.OutOfMemoryError:
        return None
    finally:
        free_memory(device)


def write_card(directory: Path, record: dict[str, Any], history: Sequence[Measurement]) -> None:
    """Write the record as JSON, the card and, if matplotlib is installed, the picture. `record`: facts about the run,
    with the history as plain numbers."""
    write_json(directory / RECORD, finite(record))
    drawn = importlib.util.find_spec("matplotlib") is not None
    if drawn:
        draw(history, directory / PICTURE)
    (directory / CARD).write_text(_card(record, history[-1], drawn), encoding="utf-8")


def _card(record: dict[str, Any], last: Measurement, drawn: bool) -> str:
    speeds = record["tokens_a_second"]
    prompts = f", and answers to {record['prompts']:,} given prompts" if record["prompts"] else ""
    lines = [
        f"# Draft for {record['target']}",
        "",
        f"A draft for speculative decoding of {record['target']}, trained by `smcserve distill` on text of this "
        "target.",
        "",
        f"- **Draft**: {record['draft']}; {record['trained_weights']:,} weights were trained.",
        f"- **Data**: {record['conversations']:,} conversations with {last.written_tokens:,} answer tokens, written "
        "by the "
        f"target at temperatures {', '.join(f'{each:g}' for each in sorted(set(record['temperatures_written'])))}: "
        f"user turns of its own{prompts}. Seed {record['seed']}.",
        f"- **Loss**: {LOSSES[record['loss']]}, after KL divergence at the beginning. {last.step:,} steps, "
        f"{last.trained_tokens:,} answer tokens seen, in {record['seconds']:,.0f} s on {record['processes']} x "
        f"{record['device']} ({speeds['written']:,.0f} tokens a second written, {speeds['trained']:,.0f} learnt from).",
        "",
        f"Measured on {record['held_out']} conversations that were held out ({last.positions:,} answer tokens, "
        f"{last.contexts} contexts of trees):",
        "",
        "| | |",
        "| :--- | ---: |",
        f"| overlap, sum of min(p, q) at temperature 1 | {last.overlap:.3f} |",
        f"| KL divergence, nats a token | {last.kl:.3f} |",
        f"| log(1 + chi-square) | {last.chi2:.3f} |",
        f"| same likeliest token | {last.same_likeliest:.3f} |",
        f"| entropy of the target, nats a token | {last.entropy:.3f} |",
        "",
        f"Number of the next {BLOCK} tokens that a tree of coupled drafting contains, and the expected speed of exact "
        "decoding on that machine, for one request in lockstep, as a multiple of the speed of the target alone:",
        "",
        "| temperature | rows | tokens | contained by depth | speed |",
        "| ---: | ---: | ---: | :--- | ---: |",
        *(
            f"| {each.temperature:g} | {each.rows} | {each.held:.2f} | "
            f"{', '.join(f'{share:.0%}' for share in each.held_by_depth)} | "
            f"{'' if each.speed is None else f'{each.speed:.2f}x'} |"
            for each in last.trees
        ),
        "",
        *([f"![The draft over time]({PICTURE})", ""] if drawn else []),
        "    smcserve generate --target TARGET --draft THIS --method exact",
        "",
    ]
    return "\n".join(lines)


def draw(history: Sequence[Measurement], path: Path) -> None:
    """Draw overlap, tokens held and, if they were measured, expected speeds over the time of the run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    minutes = [each.seconds / 60 for each in history]
    titles = ["held-out answers", f"tokens of {BLOCK} that a tree contains"]
    if any(tree.speed is not None for tree in history[-1].trees):
        titles.append("expected speed, relative to the target alone")
    figure, panels = pyplot.subplots(1, len(titles), figsize=(13 / 3 * len(titles), 3.8), layout="constrained")
    panels[0].plot(minutes, [each.overlap for each in history], "o-", label="overlap")
    panels[0].plot(minutes, [each.same_likeliest for each in history], "o--", label="same likeliest")
    for index, tree in enumerate(history[-1].trees):
        name = f"T={tree.temperature:g} N={tree.rows}"
        panels[1].plot(minutes, [each.trees[index].held for each in history], "o-", label=name)
        if tree.speed is not None:
            panels[2].plot(minutes, [each.trees[index].speed for each in history], "o-", label=name)
    for axes, title in zip(panels, titles):
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("minutes")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
