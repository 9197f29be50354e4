"""How many of a target's next tokens the draft's tree holds, after contexts of a text.

At each context the target draws its next tokens, and the draft grows a tree as a round of exact decoding in lockstep
does, in which these tokens are looked up. Every node counts that a step has kept, also where a later step keeps none of
its continuations. The engine verifies rows of full depth alone, so it confirms fewer tokens than the tree holds.

All contexts of some texts are continued together: their rows read the keys of their text as far as their context goes.

Axes: B texts, S positions of the longest text, C contexts of all texts, R rows of a tree, Y = C * R, D drafted tokens of
a row, V vocabulary, H query heads, J key/value heads."""

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
class DrawnContinuation:
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
    """Rows that continue contexts of texts through a model: C contexts with equally many rows each."""

    def __init__(
        self, model: Decoder, rope: RopeTable, texts: Sequence[OwnText], contexts: Sequence[Sequence[int]]
    ) -> None:
        """`contexts`: of each text."""
        self._model, self._rope, device = model, rope, model.embed.weight.device
        text_C = [b for b, of_text in enumerate(contexts) for _ in of_text]
        self._text_C = torch.tensor(text_C, device=device)
        self._context_C = torch.tensor([each for of_text in contexts for each in of_text], device=device)
        self._text: list[tuple[Tensor, Tensor]] = []
        self._own: list[tuple[Tensor, Tensor] | None] = [None] * model.config.num_layers
        self._size = max(len(text.tokens) for text in texts)
        # Padded on the right, where no context reads.
        tokens_BS = torch.tensor([[*text.tokens, *[0] * (self._size - len(text.tokens))] for text in texts])
        positions_T = torch.arange(self._size, device=device).repeat(len(texts))
        hidden_TE = model(tokens_BS.flatten().to(device), rope.at(positions_T), self._attend_causally)
        self.hidden = hidden_TE[self._text_C * self._size + self._context_C - 1]
        """Hidden states [Y, E] of every row's last token; at first of a row for each context."""
        self._depth = 0

    def step(self, parent_Y: Tensor, tokens_Y: Tensor) -> None:
        """Rows continue these rows by a token each."""
        rows = len(tokens_Y) // len(self._context_C)
        self._text_Y, self._context_Y = (each_C.repeat_interleave(rows) for each_C in (self._text_C, self._context_C))
        self._own = [None if one is None else (one[0][parent_Y], one[1][parent_Y]) for one in self._own]
        positions_Y = self._context_Y + self._depth
        self._depth += 1
        self.hidden = self._model(tokens_Y, self._rope.at(positions_Y), self._attend_rows)

    def _attend_causally(self, layer: int, q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (-1, self._size)).transpose(1, 2) for x in (q_THD, k_TJD, v_TJD))
        self._text.append((k, v))
        window = self._model.config.window_of(layer)
        if window is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            seen_SS = torch.ones(self._size, self._size, dtype=torch.bool, device=q.device).tril().triu(1 - window)
            out = F.scaled_dot_product_attention(q, k, v, seen_SS, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    def _attend_rows(self, layer: int, q_YHD: Tensor, k_YJD: Tensor, v_YJD: Tensor) -> Tensor:
        own, (k_BJSD, v_BJSD) = self._own[layer], self._text[layer]
        k_YJDD, v_YJDD = k_YJD[:, :, None], v_YJD[:, :, None]
        if own is not None:
            k_YJDD, v_YJDD = torch.cat((own[0], k_YJDD), 2), torch.cat((own[1], v_YJDD), 2)
        self._own[layer] = k_YJDD, v_YJDD
        size, depth = self._size, k_YJDD.shape[2]
        k, v = (torch.cat((text[self._text_Y], mine), 2) for text, mine in ((k_BJSD, k_YJDD), (v_BJSD, v_YJDD)))
        at_X = torch.arange(size + depth, device=q_YHD.device)
        is_text_X, context_Y1 = at_X < size, self._context_Y[:, None]
        position_YX = torch.where(is_text_X, at_X, context_Y1 + at_X - size)
        window = self._model.config.window_of(layer) or size + depth
        seen_YX = (~is_text_X | (at_X < context_Y1)) & (position_YX > context_Y1 + depth - 1 - window)
        return F.scaled_dot_product_attention(q_YHD[:, :, None], k, v, seen_YX[:, None, None], enable_gqa=True)[:, :, 0]


@torch.no_grad()
def draw_next(
    target: Decoder,
    texts: Sequence[OwnText],
    contexts: Sequence[Sequence[int]],
    block: int,
    temperature: float,
    seed: int,
    vocab: int,
) -> list[list[DrawnContinuation]]:
    """The next `block` tokens of the target after contexts of each text, with seeds from `seed` on: the draws of plain
    decoding."""
    device, flat = target.embed.weight.device, [each for of_text in contexts for each in of_text]
    rope = RopeTable(target.config, max(len(text.tokens) for text in texts) + block, device)
    rows, drawn = TextRows(target, rope, texts, contexts), []
    seed_C, position_C = seed + np.arange(len(flat)), np.array(flat, dtype=np.int64)
    own_C = torch.arange(len(flat), device=device)
    for depth in range(block):
        logp_CV = torch.log_softmax(target.logits(rows.hidden)[:, :vocab] / (temperature or 1.0), -1)
        if temperature:
            logp_CV = logp_CV + target_noise(seed_C, position_C + depth, vocab, device)
        drawn.append(logp_CV.argmax(-1))
        if depth + 1 < block:
            rows.step(own_C, drawn[-1])
    tokens_CD = torch.stack(drawn, 1).tolist()
    found = iter(
        [
            DrawnContinuation(context, tuple(tokens), seed + c)
            for c, (context, tokens) in enumerate(zip(flat, tokens_CD))
        ]
    )
    return [[next(found) for _ in of_text] for of_text in contexts]


class TreeDraft:
    """Grows trees of `rows` rows after contexts of texts, scored as coupled drafting does."""

    def __init__(self, draft: Decoder, vocab: int, rows: int, exponent: float) -> None:
        self._draft, self._vocab, self._rows, self._exponent = draft, vocab, rows, exponent

    @torch.no_grad()
    def held(
        self, texts: Sequence[OwnText], continuations: Sequence[Sequence[DrawnContinuation]], temperature: float
    ) -> list[list[int]]:
        """How many tokens of each text's continuations their context's tree holds."""
        flat = [each for of_text in continuations for each in of_text]
        device, count = self._draft.embed.weight.device, len(flat)
        if not count:
            return [[] for _ in texts]
        contexts = [each.context for each in flat]
        drawn_CD = torch.tensor([each.tokens for each in flat], device=device)
        longest = max(len(text.tokens) for text in texts) + drawn_CD.shape[1]
        tree = TextRows(
            self._draft,
            RopeTable(self._draft.config, longest, device),
            texts,
            [[each.context for each in of_text] for of_text in continuations],
        )
        seed_C, position_C = np.array([each.seed for each in flat]), np.array(contexts, dtype=np.int64)
        score_CR = torch.zeros(count, 1, device=device)
        is_drawn_CR = torch.ones(count, 1, dtype=torch.bool, device=device)
        held_C = torch.zeros(count, dtype=torch.int64, device=device)
        for depth in range(drawn_CD.shape[1]):
            noise_CV = target_noise(seed_C, position_C + depth, self._vocab, device) if temperature else None
            score_CX = self._scores(tree.hidden, score_CR, noise_CV, temperature).flatten(1)
            score_CR, best_CR = score_CX.topk(min(self._rows, score_CX.shape[1]))
            parent_CR, token_CR = best_CR // self._vocab, best_CR % self._vocab
            is_drawn_CR = is_drawn_CR.gather(1, parent_CR) & (token_CR == drawn_CD[:, depth, None])
            held_C += is_drawn_CR.any(1)
            before = tree.hidden.shape[0] // count
            first_C1 = torch.arange(count, device=device)[:, None] * before
            if depth + 1 < drawn_CD.shape[1]:
                tree.step((first_C1 + parent_CR).flatten(), token_CR.flatten())
        found = iter(held_C.tolist())
        return [[next(found) for _ in of_text] for of_text in continuations]

    def _scores(self, hidden_YE: Tensor, score_CR: Tensor, noise_CV: Tensor | None, temperature: float) -> Tensor:
        """Log-probability [C, R, V] that each row's path and token win the target's draws."""
        logq_YV = torch.log_softmax(self._draft.logits(hidden_YE)[:, : self._vocab] / (temperature or 1.0), -1)
        exponent_Y = torch.full((len(logq_YV),), self._exponent, device=logq_YV.device)
        rows = score_CR.shape[1]
        noise_YV = torch.zeros_like(logq_YV) if noise_CV is None else noise_CV.repeat_interleave(rows, 0)
        won_YV = coupled_logp(logq_YV, exponent_Y, noise_YV)
        return score_CR[:, :, None] + won_YV.unflatten(0, (-1, rows))
