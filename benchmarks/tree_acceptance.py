"""How many of a target's next tokens the draft's tree holds, on text that the target wrote itself.

    python -m benchmarks.tree_acceptance --target DIR --draft DIR [--temperature 1 ...] [-n 8] [-k 5] [--texts 16]

The target writes conversations: user turns from its chat template's opening, then the answers to them. Contexts are
taken from the answers at equal distances. At each, the target draws its next tokens, and the draft grows a tree as a
round of exact decoding in lockstep does, in which these tokens are looked up.

Every node counts that a step has kept, also where a later step keeps none of its continuations. The engine verifies rows
of full depth alone, so it confirms fewer tokens than the tree holds.

Two things decide the result besides the models. A mean over contexts is larger than a mean over the rounds of served
answers: a round begins where the last one ended, so text that the draft predicts badly has more rounds for each token.
And the temperature at which the contexts were written, user turns too, matters as much as that of the draws: text that
a small model wrote at temperature 1 drifts to where both models are uncertain. Contexts are written at the temperature
of the draws, but at most at 0.7.

Knows models, the algorithm of coupled drafting, and an engine to write the text.

Axes: S positions of a text, R rows of a tree, D drafted tokens of a row, V vocabulary, H query heads, J key/value
heads."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from smc.algorithm.coupling import coupled_logp
from smc.api.engine_config import EngineConfig
from smc.api.request import Request
from smc.api.sampling_params import Method, SamplingParams
from smc.local_engine import ModelPair, local_engine
from smc.model.decoder import Decoder, RopeTable
from smc.philox import Purpose, exponentials, words

USER_TOKENS, ANSWER_TOKENS = 64, 112
MOST_TEXT_TEMPERATURE = 0.7
PREFILL_CHUNK = 4096
PROBE = "x"
"""Content of the message that shows where a template writes a user's text."""


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


def write_texts(pair: ModelPair, count: int, temperature: float, seed: int = 0) -> list[OwnText]:
    """Conversations, all of which is drawn at `temperature`. Raises ValueError for a model whose chat template cannot be
    used."""
    opening, closing = template_parts(pair)
    turns = continued(pair, [opening] * count, temperature, USER_TOKENS, range(seed, seed + count))
    ends = set(pair.tokenizer.eos_ids)
    prompts = [[*opening, *(token for token in turn if token not in ends), *closing] for turn in turns]
    answers = continued(pair, prompts, temperature, ANSWER_TOKENS, range(seed, seed + count))
    return [OwnText((*prompt, *answer), len(prompt)) for prompt, answer in zip(prompts, answers)]


def template_parts(pair: ModelPair) -> tuple[list[int], list[int]]:
    """The chat template's tokens before and after a user's text."""
    ids, probe = pair.tokenizer.chat([{"role": "user", "content": PROBE}]), pair.tokenizer.encode(PROBE, False)
    found = [i for i in range(len(ids)) if ids[i : i + len(probe)] == probe]
    if not found:
        raise ValueError(f"the chat template shows no {PROBE!r} where a user's text is {PROBE!r}")
    return ids[: found[-1]], ids[found[-1] + len(probe) :]


def draw_next(
    pair: ModelPair, text: OwnText, contexts: Sequence[int], block: int, temperature: float, seed: int
) -> list[Continuation]:
    """The next `block` tokens of the target after contexts of a text."""
    seeds = range(seed, seed + len(contexts))
    prompts = [text.tokens[:context] for context in contexts]
    drawn = continued(pair, prompts, temperature, block, seeds, ignore_eos=True, cached=text.tokens)
    return [Continuation(*each) for each in zip(contexts, drawn, seeds)]


def continued(
    pair: ModelPair,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    tokens: int,
    seeds: Sequence[int],
    ignore_eos: bool = False,
    cached: Sequence[int] = (),
) -> list[tuple[int, ...]]:
    """Answers of the target alone to prompts, in one batch. `cached`: a text that the prompts are beginnings of."""
    longest = max(len(cached), *map(len, prompts)) + tokens
    config = EngineConfig(form="lockstep", block=tokens if ignore_eos else 8, max_slots=len(prompts))
    engine = local_engine(pair, replace(config, max_context=longest, prefill_chunk=PREFILL_CHUNK))
    params = SamplingParams(method=Method.TARGET, temperature=temperature, max_tokens=tokens, ignore_eos=ignore_eos)
    if cached:
        for _ in engine.run([Request("cached", tuple(cached), replace(params, max_tokens=1))]):
            pass
    requests = [
        Request(str(i), tuple(prompt), replace(params, seed=seed))
        for i, (prompt, seed) in enumerate(zip(prompts, seeds))
    ]
    answers = {out.request_id: out.answer.tokens for out in engine.run(requests) if out.answer is not None}
    return [answers[request.request_id] for request in requests]


class TreeDraft:
    """Grows trees of `rows` rows after contexts of texts, scored as coupled drafting does."""

    def __init__(self, draft: Decoder, vocab: int, rows: int, exponent: float) -> None:
        self._draft, self._vocab, self._rows, self._exponent = draft, vocab, rows, exponent
        self._rope = RopeTable(draft.config, draft.config.max_context)

    @torch.inference_mode()
    def held(self, text: OwnText, continuations: Sequence[Continuation], temperature: float) -> list[int]:
        """How many tokens of each continuation its context's tree holds."""
        keys = _Keys(self._draft.config.num_layers)
        position_S = torch.arange(len(text.tokens))
        hidden_SE = self._draft(torch.tensor(text.tokens), self._rope.at(position_S), keys.attend_causally)
        return [
            self._held(keys.cut(each.context), hidden_SE[each.context - 1 : each.context], each, temperature)
            for each in continuations
        ]

    def _held(self, keys: _Keys, hidden_RE: Tensor, drawn: Continuation, temperature: float) -> int:
        """The tree grows as long as it holds the continuation."""
        score_R, tokens_RD = torch.zeros(1), torch.empty(1, 0, dtype=torch.int64)
        for depth in range(len(drawn.tokens)):
            position = drawn.context + depth
            score_RV = score_R[:, None] + self._scores(hidden_RE, drawn.seed, position, temperature)
            best_R = score_RV.flatten().topk(self._rows).indices
            parent_R, token_R = best_R // self._vocab, best_R % self._vocab
            tokens_RD, score_R = torch.cat((tokens_RD[parent_R], token_R[:, None]), 1), score_RV.flatten()[best_R]
            if not (tokens_RD == torch.tensor(drawn.tokens[: depth + 1])).all(1).any():
                return depth
            keys.take(parent_R)
            hidden_RE = self._draft(token_R, self._rope.at(torch.full_like(token_R, position)), keys.attend_rows)
        return len(drawn.tokens)

    def _scores(self, hidden_RE: Tensor, seed: int, position: int, temperature: float) -> Tensor:
        """Log-probability [R, V] that each token wins the target's draw."""
        logq_RV = torch.log_softmax(self._draft.logits(hidden_RE)[:, : self._vocab] / (temperature or 1.0), -1)
        exponent_R = torch.full((len(logq_RV),), self._exponent)
        noise_RV = target_noise(seed, position, self._vocab) if temperature else torch.zeros_like(logq_RV)
        return coupled_logp(logq_RV, exponent_R, noise_RV)


def target_noise(seed: int, position: int, vocab: int) -> Tensor:
    """Gumbel noise [1, V] of the target's draw at a position."""
    seed_1, zero_1, position_1 = (np.array([value]) for value in (seed, 0, position))
    word0, word1, _, _ = map(torch.from_numpy, words(seed_1, zero_1, zero_1, position_1, Purpose.TARGET))
    return -exponentials(word0, word1, vocab).log()


class _Keys:
    """Keys and values of a text, and of the rows of one tree behind a context."""

    def __init__(self, layers: int) -> None:
        self._text: list[tuple[Tensor, Tensor]] = []
        self._rows: list[tuple[Tensor, Tensor] | None] = [None] * layers

    def attend_causally(self, layer: int, q_SHD: Tensor, k_SJD: Tensor, v_SJD: Tensor) -> Tensor:
        self._text.append((k_SJD, v_SJD))
        q, k, v = (x.transpose(0, 1)[None] for x in (q_SHD, k_SJD, v_SJD))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(
            0, 1
        )

    def cut(self, context: int) -> _Keys:
        """Those of the first tokens of the text, with a tree that has no token yet."""
        keys = _Keys(len(self._text))
        keys._text = [(k[:context], v[:context]) for k, v in self._text]
        return keys

    def take(self, parent_R: Tensor) -> None:
        """Rows continue these rows."""
        self._rows = [None if one is None else (one[0][parent_R], one[1][parent_R]) for one in self._rows]

    def attend_rows(self, layer: int, q_RHD: Tensor, k_RJD: Tensor, v_RJD: Tensor) -> Tensor:
        own, (k_SJD, v_SJD) = self._rows[layer], self._text[layer]
        k_RDJD, v_RDJD = k_RJD[:, None], v_RJD[:, None]
        if own is not None:
            k_RDJD, v_RDJD = torch.cat((own[0], k_RDJD), 1), torch.cat((own[1], v_RDJD), 1)
        self._rows[layer] = k_RDJD, v_RDJD
        rows = len(q_RHD)
        k, v = (
            torch.cat((text.expand(rows, *text.shape), mine), 1).transpose(1, 2)
            for text, mine in ((k_SJD, k_RDJD), (v_SJD, v_RDJD))
        )
        return torch.nn.functional.scaled_dot_product_attention(q_RHD[:, :, None], k, v, enable_gqa=True)[:, :, 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--temperature", type=float, action="append", help="may be repeated; default: 1, 0.7, 0.4")
    parser.add_argument("-n", type=int, default=8, help="rows of a tree; default: %(default)s")
    parser.add_argument("-k", type=int, default=5, help="tokens of a row; default: %(default)s")
    parser.add_argument("--exponent", type=float, default=1.0, help="of coupled drafting; default: %(default)s")
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--distance", type=int, default=8, help="tokens between contexts; default: %(default)s")
    parser.add_argument("--json", type=Path, help="write contexts, and how many tokens were held, here")
    given = parser.parse_args()
    pair = ModelPair.load(given.target, given.draft)
    tree = TreeDraft(pair.draft, pair.tokenizer.size, given.n, given.exponent)
    record: dict[str, list[dict]] = {}
    for temperature in given.temperature or (1.0, 0.7, 0.4):
        found = record[f"{temperature:g}"] = []
        for text in write_texts(pair, given.texts, min(temperature, MOST_TEXT_TEMPERATURE)):
            seed = sum(len(each["held"]) for each in found)
            drawn = draw_next(pair, text, text.contexts(given.distance), given.k, temperature, seed)
            found += [as_record(text, drawn, tree.held(text, drawn, temperature))]
        held = [count for each in found for count in each["held"]]
        error = statistics.stdev(held) / len(held) ** 0.5
        print(
            f"temperature {temperature:g}: {statistics.mean(held):.2f} +- {error:.2f} of {given.k}, {len(held)} contexts"
        )
        if given.json:
            given.json.write_text(json.dumps(record))


def as_record(text: OwnText, drawn: Sequence[Continuation], held: Sequence[int]) -> dict:
    """One text of the file of --json."""
    return {
        "tokens": text.tokens,
        "answer_from": text.answer_from,
        "drawn": [[each.context, each.tokens, each.seed] for each in drawn],
        "held": list(held),
    }


def from_record(record: dict) -> tuple[OwnText, list[Continuation], list[int]]:
    """Inverse of `as_record`."""
    drawn = [Continuation(context, tuple(tokens), seed) for context, tokens, seed in record["drawn"]]
    return OwnText(tuple(record["tokens"]), record["answer_from"]), drawn, record["held"]


if __name__ == "__main__":
    main()
