"""How many of a target's next tokens the draft's tree holds, on text that the target wrote itself.

    python -m benchmarks.tree_acceptance --target DIR --draft DIR [--temperature 1 ...] [-n 8] [-k 5] [--texts 16]

The target writes conversations: user turns from its chat template's opening, then the answers to them. Contexts are
taken from the answers at equal distances; `smc.distill.trees` says what happens at each.

Two things decide the result besides the models. A mean over contexts is larger than a mean over the rounds of served
answers: a round begins where the last one ended, so text that the draft predicts badly has more rounds for each token.
And the temperature at which the contexts were written, user turns too, matters as much as that of the draws: text that
a small model wrote at temperature 1 drifts to where both models are uncertain. Contexts are written at the temperature
of the draws, but at most at 0.7.

Knows models, and an engine to write the text."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from smc.api.engine_config import EngineConfig
from smc.api.request import Request
from smc.api.sampling_params import Method, SamplingParams
from smc.distill.talk import ChatFormat
from smc.distill.trees import DrawnContinuation, OwnText, TreeDraft, draw_next
from smc.local_engine import ModelPair, local_engine

USER_TOKENS, ANSWER_TOKENS = 64, 112
MOST_TEXT_TEMPERATURE = 0.7
PREFILL_CHUNK = 4096


def write_texts(pair: ModelPair, count: int, temperature: float, seed: int = 0) -> list[OwnText]:
    """Conversations, all of which is drawn at `temperature`. Raises ValueError for a model whose chat template cannot be
    used."""
    chat = ChatFormat.of(pair.tokenizer)
    opening, closing = chat.opening, chat.closing
    turns = continued(pair, [opening] * count, temperature, USER_TOKENS, range(seed, seed + count))
    ends = set(pair.tokenizer.eos_ids)
    prompts = [[*opening, *(token for token in turn if token not in ends), *closing] for turn in turns]
    answers = continued(pair, prompts, temperature, ANSWER_TOKENS, range(seed, seed + count))
    return [OwnText((*prompt, *answer), len(prompt)) for prompt, answer in zip(prompts, answers)]


def continued(
    pair: ModelPair, prompts: Sequence[Sequence[int]], temperature: float, tokens: int, seeds: Sequence[int]
) -> list[tuple[int, ...]]:
    """Answers of the target alone to prompts, in one batch."""
    longest = max(map(len, prompts)) + tokens
    config = EngineConfig(form="lockstep", block=8, max_slots=len(prompts))
    engine = local_engine(pair, replace(config, max_context=longest, prefill_chunk=PREFILL_CHUNK))
    params = SamplingParams(method=Method.TARGET, temperature=temperature, max_tokens=tokens)
    requests = [
        Request(str(i), tuple(prompt), replace(params, seed=seed))
        for i, (prompt, seed) in enumerate(zip(prompts, seeds))
    ]
    answers = {out.request_id: out.answer.tokens for out in engine.run(requests) if out.answer is not None}
    return [answers[request.request_id] for request in requests]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--temperature", type=float, action="append", help="may be repeated; default: 1, 0.7, 0.4")
    parser.add_argument("-n", type=int, default=8, help="rows of a tree; default: %(default)s")
    parser.add_argument("-k", type=int, default=5, help="tokens of a row; default: %(default)s")
    parser.add_argument("--exponent", type=float, default=1.0, help="of coupled drafting; default: %(default)s")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--distance", type=int, default=8, help="tokens between contexts; default: %(default)s")
    parser.add_argument("--json", type=Path, help="write contexts, and how many tokens were held, here")
    given = parser.parse_args()
    on_gpu = given.device == "cuda"
    pair = ModelPair.load(
        given.target, given.draft, dtype=torch.bfloat16 if on_gpu else torch.float32, device=given.device
    )
    tree = TreeDraft(pair.draft, pair.tokenizer.size, given.n, given.exponent)
    record: dict[str, list[dict]] = {}
    for temperature in given.temperature or (1.0, 0.7, 0.4):
        found = record[f"{temperature:g}"] = []
        for text in write_texts(pair, given.texts, min(temperature, MOST_TEXT_TEMPERATURE)):
            seed = sum(len(each["held"]) for each in found)
            contexts = text.contexts(given.distance)
            (drawn,) = draw_next(pair.target, [text], [contexts], given.k, temperature, seed, pair.tokenizer.size)
            (held,) = tree.held([text], [drawn], temperature)
            found.append(as_record(text, drawn, held))
        counts = [count for each in found for count in each["held"]]
        error = statistics.stdev(counts) / len(counts) ** 0.5
        print(
            f"temperature {temperature:g}: {statistics.mean(counts):.2f} +- {error:.2f} of {given.k}, "
            f"{len(counts)} contexts"
        )
        if given.json:
            given.json.write_text(json.dumps(record))


def as_record(text: OwnText, drawn: Sequence[DrawnContinuation], held: Sequence[int]) -> dict:
    """One text of the file of --json."""
    return {
        "tokens": text.tokens,
        "answer_from": text.answer_from,
        "drawn": [[each.context, each.tokens, each.seed] for each in drawn],
        "held": list(held),
    }


def from_record(record: dict) -> tuple[OwnText, list[DrawnContinuation], list[int]]:
    """Inverse of `as_record`."""
    drawn = [DrawnContinuation(context, tuple(tokens), seed) for context, tokens, seed in record["drawn"]]
    return OwnText(tuple(record["tokens"]), record["answer_from"]), drawn, record["held"]


if __name__ == "__main__":
    main()
