"""Model pairs small enough to enumerate: every possible answer with its exact probability under the target."""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import tokenizers
import torch
from tokenizers import decoders, models

from smc.local_engine import ModelPair
from smc.model.decoder import Decoder
from smc.model.tokenizer import Tokenizer
from tests.model.dense import dense_logits
from tests.model.tiny import random_decoder, tiny_config

LETTERS = "abcdefgh"


def letter_tokenizer(size: int) -> Tokenizer:
    """A tokenizer with `size` ids: letters, and a last one that ends the text."""
    return tokenizer_of(LETTERS[: size - 1])


def tokenizer_of(texts: Sequence[str]) -> Tokenizer:
    """A tokenizer with one token for each text, and a last one that ends texts."""
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(texts)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken("<eos>", special=True)])
    return Tokenizer(tokenizer, (len(texts),), {"eos_token": "<eos>"}, None)


def peaked(model: Decoder, scale: float) -> Decoder:
    """Scale the head for sharper distributions: random tiny models are close to uniform and would not tell a right
    weight from a wrong one."""
    model.lm_head.weight.mul_(scale)
    return model


@cache
def tiny_pair(
    vocab: int = 4, *, scale: float = 0.4, draft_seed: int = 1, target_seed: int = 2, max_context: int = 64
) -> ModelPair:
    def model(seed: int, layers: int) -> Decoder:
        config = tiny_config(vocab_size=vocab, num_layers=layers, max_context=max_context, tied_embeddings=False)
        return peaked(random_decoder(config, seed), scale)

    return ModelPair(model(target_seed, 2), model(draft_seed, 1), letter_tokenizer(vocab), max_context)


def in_float64(pair: ModelPair) -> ModelPair:
    """Return the pair with float64 weights. Its logits hardly depend on the order of sums, so where an engine in
    float32 decides a near tie by its rounding, it draws the same however it comes to it."""
    return replace(pair, target=copy.deepcopy(pair.target).double(), draft=copy.deepcopy(pair.draft).double())


def next_log_probs(model: Decoder, tokens: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """log p [V] of the token after `tokens`, recomputed from scratch."""
    return torch.log_softmax(_logits_after(model, tuple(tokens)) / temperature, -1)


def logits_after(model: Decoder, tokens: Sequence[int]) -> torch.Tensor:
    """Logits [V] of a model for the token after `tokens`."""
    return _logits_after(model, tuple(tokens))


def target_logits_after(tokens: Sequence[int]) -> torch.Tensor:
    """Logits [V] of the tiny pair's target for the token after `tokens`."""
    return _logits_after(tiny_pair().target, tuple(tokens))


@cache
@torch.inference_mode()
def _logits_after(model: Decoder, tokens: tuple[int, ...]) -> torch.Tensor:
    """Cached: many tests need the same logits, of few models and short texts."""
    return dense_logits(model, torch.tensor(tokens))[-1].double()


def exact_law(
    model: Decoder, prompt: Sequence[int], max_tokens: int, eos: int, temperature: float = 1.0, alpha: float = 1.0
) -> dict:
    """Mass prod p^alpha of every answer; EOS absorbs, max_tokens truncates. Sums to 1 at alpha = 1."""
    return law_of(
        lambda prefix: next_log_probs(model, (*prompt, *prefix), temperature).tolist(), max_tokens, eos, alpha=alpha
    )


def law_of(log_probs: Callable[[tuple[int, ...]], list[float]], max_tokens: int, *eos: int, alpha: float = 1.0) -> dict:
    """The probability of every answer where `log_probs` returns the log-probabilities of the next token after a prefix.
    Leaves out answers of probability zero."""
    law: dict[tuple[int, ...], float] = {}

    def visit(prefix: tuple[int, ...], log_mass: float) -> None:
        if len(prefix) == max_tokens or (prefix and prefix[-1] in eos):
            law[prefix] = math.exp(log_mass)
            return
        for token, log_p in enumerate(log_probs(prefix)):
            if log_p > -math.inf:
                visit((*prefix, token), log_mass + alpha * log_p)

    visit((), 0.0)
    return law


def truncated_law(
    model: Decoder, prompt: Sequence[int], max_tokens: int, eos: int, temperature: float, top_k: int
) -> dict:
    """Probability of every answer if each token is drawn from the `top_k` most probable ones."""

    def log_probs(prefix: tuple[int, ...]) -> list[float]:
        log_p = next_log_probs(model, (*prompt, *prefix), temperature)
        return log_p.where(log_p >= log_p.topk(top_k).values[-1], -torch.inf).log_softmax(-1).tolist()

    return law_of(log_probs, max_tokens, eos)


def far_from(law: dict, found: list[tuple[int, ...]]) -> float:
    """Distance of the answers' chi-square statistic from its mean, in standard deviations. Mean and variance are exact,
    even for rare answers."""
    counts, n, k = Counter(found), len(found), len(law)
    assert not [answer for answer in counts if not law.get(answer)], "an answer that the target's law does not have"
    chi = sum((counts[answer] - n * p) ** 2 / (n * p) for answer, p in law.items())
    variance = 2 * (k - 1) + (sum(1 / p for p in law.values()) - k * k - 2 * k + 2) / n
    return abs(chi - (k - 1)) / variance**0.5


def likelier_elsewhere(law: dict, other: dict, found: list[tuple[int, ...]]) -> float:
    """Distance, in standard errors, of the answers' mean of log law / other from its expectation under `law`. No other
    statistic separates the two distributions better."""
    ratio = {answer: math.log(p / other[answer]) for answer, p in law.items()}
    mean = sum(p * ratio[answer] for answer, p in law.items())
    variance = sum(p * (ratio[answer] - mean) ** 2 for answer, p in law.items())
    return abs(sum(ratio[answer] for answer in found) / len(found) - mean) / (variance / len(found)) ** 0.5


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and the standard error of the mean."""
    mean = sum(values) / len(values)
    return mean, (sum((x - mean) ** 2 for x in values) / len(values) ** 2) ** 0.5


def total_variation(law: dict, counts: dict, total: int) -> float:
    keys = set(itertools.chain(law, counts))
    return sum(abs(law.get(k, 0.0) - counts.get(k, 0) / total) for k in keys) / 2


def character_pair(texts: Sequence[str], context: int) -> ModelPair:
    """Random models over single characters, the longer `texts` (written as byte-level vocabularies write them) and an
    end token."""
    tokenizer = tokenizer_of(["Ġ", *map(chr, range(33, 127)), *texts])

    def model(seed: int, layers: int) -> Decoder:
        shape = {"vocab_size": tokenizer.size, "max_context": context, "tied_embeddings": False}
        return peaked(random_decoder(tiny_config(num_layers=layers, **shape), seed), 0.3)

    return ModelPair(model(2, 2), model(1, 1), tokenizer, context)
