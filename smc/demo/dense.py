"""Measures the accuracy of a `Decoder` with plain sampling.

Knows nothing about speculative decoding: accuracies are those of a single model.

Axes: B rows, S token positions, E hidden size, D head dimension, V vocabulary."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from torch import Tensor

from smc.demo import MAX_ANSWER
from smc.demo.problems import Problem, grade
from smc.demo.tokenizer import EOS, render
from smc.model.decoder import Decoder
from smc.model.dense import hidden_states
from smc.statistics import Accuracy


def measure(model: Decoder, rope_SD: Tensor, tokenizer: Tokenizer, problems: list[Problem], seed: int) -> Accuracy:
    """Sample one answer to each problem at temperature 1, and grade it."""
    prompts = [tokenizer.encode(render(problem.question)).ids for problem in problems]
    eos = tokenizer.token_to_id(EOS)
    assert eos is not None
    answers = sample_answers(model, rope_SD, prompts, eos, seed)
    texts = (tokenizer.decode(answer) for answer in answers)
    return Accuracy(sum(grade(problem, text) for problem, text in zip(problems, texts)), len(problems))


@torch.inference_mode()
def sample_answers(model: Decoder, rope_SD: Tensor, prompts: list[list[int]], eos: int, seed: int) -> list[list[int]]:
    """Continue every prompt until `eos` or MAX_ANSWER tokens. Returns the new tokens without `eos`."""
    device = rope_SD.device
    generator = torch.Generator(device).manual_seed(seed)
    rows_B = torch.arange(len(prompts), device=device)
    end_B = torch.tensor([len(prompt) for prompt in prompts], device=device)
    width = int(end_B.max())
    tokens_BS = torch.full((len(prompts), width + MAX_ANSWER), eos, device=device)
    for row, prompt in enumerate(prompts):
        tokens_BS[row, : len(prompt)] = torch.tensor(prompt, device=device)
    done_B = torch.zeros_like(end_B, dtype=torch.bool)
    for new in range(MAX_ANSWER):
        # Rows are padded on the right, so causal attention never reads the padding.
        hidden_BSE = hidden_states(model, rope_SD, tokens_BS[:, : width + new])
        probability_BV = model.logits(hidden_BSE[rows_B, end_B + new - 1]).softmax(-1)
        next_B = torch.multinomial(probability_BV, 1, generator=generator)[:, 0].masked_fill(done_B, eos)
        tokens_BS[rows_B, end_B + new] = next_B
        done_B |= next_B == eos
        if done_B.all():
            break
    answers = [row[len(prompt) : len(prompt) + MAX_ANSWER] for row, prompt in zip(tokens_BS.tolist(), prompts)]
    return [answer[: answer.index(eos)] if eos in answer else answer for answer in answers]
