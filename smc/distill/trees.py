"""How many of a target's next tokens the draft's tree holds, after contexts of a text.

At each context the target draws its next tokens, and the draft grows a tree as a round of exact decoding in lockstep
does, in which these tokens are looked up. Every node counts that a step has kept, also where a later step keeps none of
its continuations. The engine verifies rows of full depth alone, so it confirms fewer tokens than the tree holds.

All contexts of a text are continued together: their rows read the text's keys as far as their context goes.

Axes: S positions of a text, C contexts, R rows of a tree, Y = C * R, D drafted tokens of a row, V vocabulary, H query
heads, J key/value heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from smc.algorithm.coupling import coupled_logp
from smc.model.decoder import Decoder, RopeTable
from smc.philox import Purpose, exponentials, words


@dataclass(frozen=True)
class OwnText:
    """A conversation that the target wrote."""

    tokens: tuple[int, ...]
    answer_from: int
    """Index of the answer's first token."""

    def contexts(self, distance: int) -> list[int]:
        """Numbers of tokens that contexts have: within the answer, at equal distances."""
        return list(range(self.answer_from + 1, len(self.tokens), distance))


@dataclass(frozen=True)
class Continuation:
    """What the target draws next after a context."""

    context: int
    """Tokens of the text that it continues."""
    tokens: tuple[int, ...]
    seed: int


def target_noise(seed_C: np.ndarray, position_C: np.ndarray, vocab: int, device: torch.device) -> Tensor:
    """Gumbel noise [C, V] of the target's draws at these positions. `seed`, `position`: int64."""
    zero_C = np.zeros_like(seed_C)
    word0_C, word1_C, _, _ = map(torch.from_numpy, words(seed_C, zero_C, zero_C, position_C, Purpose.TARGET))
    return -exponentials(word0_C.to(device), word1_C.to(device), vocab).log()


class TextRows:
    """Rows that continue contexts of one text through a model: C contexts with equally many rows each."""

    def __init__(self, model: Decoder, rope: RopeTable, tokens: Sequence[int], contexts: Sequence[int]) -> None:
        self._model, self._rope, device = model, rope, model.embed.weight.device
        self._context_C = torch.tensor(contexts, device=device)
        self._text: list[tuple[Tensor, Tensor]] = []
        self._own: list[tuple[Tensor, Tensor] | None] = [None] * model.config.num_layers
        position_S = torch.arange(len(tokens), device=device)
        hidden_SE = model(torch.tensor(tokens, device=device), rope.at(position_S), self._attend_causally)
        self.hidden = hidden_SE[self._context_C - 1]
        """Hidden states [Y, E] of every row's last token; at first of a row for each context."""
        self._depth = 0

    def step(self, parent_Y: Tensor, tokens_Y: Tensor) -> None:
        """Rows continue these rows by a token each."""
        rows = len(tokens_Y) // len(self._context_C)
        self._context_Y = self._context_C.repeat_interleave(rows)
        self._own = [None if one is None else (one[0][parent_Y], one[1][parent_Y]) for one in self._own]
        positions_Y = self._context_Y + self._depth
        self._depth += 1
        self.hidden = self._model(tokens_Y, self._rope.at(positions_Y), self._attend_rows)

    def _attend_causally(self, layer: int, q_SHD: Tensor, k_SJD: Tensor, v_SJD: Tensor) -> Tensor:
        self._text.append((k_SJD, v_SJD))
        q, k, v = (x.transpose(0, 1)[None] for x in (q_SHD, k_SJD, v_SJD))
        size, window = len(q_SHD), self._model.config.window_of(layer) or len(q_SHD)
        seen_SS = torch.ones(size, size, dtype=torch.bool, device=q.device).tril().triu(1 - window)
        return F.scaled_dot_product_attention(q, k, v, seen_SS, enable_gqa=True)[0].transpose(0, 1)

    def _attend_rows(self, layer: int, q_YHD: Tensor, k_YJD: Tensor, v_YJD: Tensor) -> Tensor:
        own, (k_SJD, v_SJD) = self._own[layer], self._text[layer]
        k_YDJD, v_YDJD = k_YJD[:, None], v_YJD[:, None]
        if own is not None:
            k_YDJD, v_YDJD = torch.cat((own[0], k_YDJD), 1), torch.cat((own[1], v_YDJD), 1)
        self._own[layer] = k_YDJD, v_YDJD
        rows, size, depth = len(q_YHD), len(k_SJD), k_YDJD.shape[1]
        k, v = (
            torch.cat((text.expand(rows, *text.shape), mine), 1).transpose(1, 2)
            for text, mine in ((k_SJD, k_YDJD), (v_SJD, v_YDJD))
        )
        at_X = torch.arange(size + depth, device=q_YHD.device)
        is_text_X, context_Y1 = at_X < size, self._context_Y[:, None]
        position_YX = torch.where(is_text_X, at_X, context_Y1 + at_X - size)
        window = self._model.config.window_of(layer) or size + depth
        seen_YX = (~is_text_X | (at_X < context_Y1)) & (position_YX > context_Y1 + depth - 1 - window)
        seen = seen_YX[:, None, None]
        return F.scaled_dot_product_attention(q_YHD[:, :, None], k, v, seen, enable_gqa=True)[:, :, 0]


@torch.no_grad()
def draw_next(
    target: Decoder, text: OwnText, contexts: Sequence[int], block: int, temperature: float, seed: int, vocab: int
) -> list[Continuation]:
    """The next `block` tokens of the target after contexts of a text, with seeds from `seed` on: the draws of plain
    decoding."""
    device = target.embed.weight.device
    rope = RopeTable(target.config, len(text.tokens) + block, device)
    rows, drawn = TextRows(target, rope, text.tokens, contexts), []
    seed_C, position_C = seed + np.arange(len(contexts)), np.array(contexts, dtype=np.int64)
    own_C = torch.arange(len(contexts), device=device)
    for depth in range(block):
        logp_CV = torch.log_softmax(target.logits(rows.hidden)[:, :vocab] / (temperature or 1.0), -1)
        if temperature:
            logp_CV = logp_CV + target_noise(seed_C, position_C + depth, vocab, device)
        drawn.append(logp_CV.argmax(-1))
        if depth + 1 < block:
            rows.step(own_C, drawn[-1])
    tokens_CD = torch.stack(drawn, 1).tolist()
    return [
        Continuation(context, tuple(tokens), seed + c) for c, (context, tokens) in enumerate(zip(contexts, tokens_CD))
    ]


class TreeDraft:
    """Grows trees of `rows` rows after contexts of texts, scored as coupled drafting does."""

    def __init__(self, draft: Decoder, vocab: int, rows: int, exponent: float) -> None:
        self._draft, self._vocab, self._rows, self._exponent = draft, vocab, rows, exponent
        self._rope = RopeTable(draft.config, draft.config.max_context, draft.embed.weight.device)

    @torch.no_grad()
    def held(self, text: OwnText, continuations: Sequence[Continuation], temperature: float) -> list[int]:
        """How many tokens of each continuation its context's tree holds."""
        device, count = self._draft.embed.weight.device, len(continuations)
        if not count:
            return []
        contexts = [each.context for each in continuations]
        tree = TextRows(self._draft, self._rope, text.tokens, contexts)
        drawn_CD = torch.tensor([each.tokens for each in continuations], device=device)
        seed_C, position_C = np.array([each.seed for each in continuations]), np.array(contexts, dtype=np.int64)
        score_CR = torch.zeros(count, 1, device=device)
        is_drawn_CR = torch.ones(count, 1, dtype=torch.bool, device=device)
        held_C = torch.zeros(count, dtype=torch.int64, device=device)
        for depth in range(drawn_CD.shape[1]):
            noise_CV = target_noise(seed_C, position_C + depth, self._vocab, device) if temperature else None
            score_CX = self._scores(tree.hidden, score_CR, noise_CV, temperature).flatten(1)
            score_CR, best_CR = score_CX.topk(self._rows)
            parent_CR, token_CR = best_CR // self._vocab, best_CR % self._vocab
            is_drawn_CR = is_drawn_CR.gather(1, parent_CR) & (token_CR == drawn_CD[:, depth, None])
            held_C += is_drawn_CR.any(1)
            before = tree.hidden.shape[0] // count
            first_C1 = torch.arange(count, device=device)[:, None] * before
            if depth + 1 < drawn_CD.shape[1]:
                tree.step((first_C1 + parent_CR).flatten(), token_CR.flatten())
        return held_C.tolist()

    def _scores(self, hidden_YE: Tensor, score_CR: Tensor, noise_CV: Tensor | None, temperature: float) -> Tensor:
        """Log-probability [C, R, V] that each row's path and token win the target's draws."""
        logq_YV = torch.log_softmax(self._draft.logits(hidden_YE)[:, : self._vocab] / (temperature or 1.0), -1)
        exponent_Y = torch.full((len(logq_YV),), self._exponent, device=logq_YV.device)
        rows = score_CR.shape[1]
        noise_YV = torch.zeros_like(logq_YV) if noise_CV is None else noise_CV.repeat_interleave(rows, 0)
        won_YV = coupled_logp(logq_YV, exponent_Y, noise_YV)
        return score_CR[:, :, None] + won_YV.unflatten(0, (-1, rows))
