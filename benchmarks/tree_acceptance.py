"""Measures how many of a target's next tokens the draft's tree contains, on text that the target wrote itself.

    python -m benchmarks.tree_acceptance --target DIR --draft DIR [--temperature 1 ...] [-n 8] [-k 5] [--texts 16]
        [--draft-dtype bfloat16 --draft-dtype fp8 --draft-dtype int4]

The target writes conversations: user turns from its chat template's opening, then the answers to them. The demo target
answers problems. Contexts are taken from the answers at equal distances; `smc.distill.measure` describes what is
measured at each. A draft may be loaded in several types: all get the same contexts, so that their differences have
small errors.

Two things affect the result besides the models. First, a mean over contexts is larger than a mean over the rounds of
served answers: a round begins where the last one ended, so text that the draft predicts badly has more rounds for each
token. Second, the temperature at which the contexts, including user turns, were written matters as much as that of the
draws: text that a small model wrote at temperature 1 drifts to where both models are uncertain. Contexts are written at
the temperature of the draws, but at most at 0.7.

Knows models, and an engine that writes the text."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.load import problem_prompts
from smc import demo
from smc.api.engine_config import EngineConfig
from smc.api.request import Request
from smc.api.sampling_params import Method, SamplingParams
from smc.distill.conversations import ChatFormat
from smc.distill.measure import DrawnContinuation, OwnText, TreeDraft, draw_next
from smc.local_engine import ModelPair, local_engine
from smc.model.linear import DTYPES
from smc.model.source import SourcePair

USER_TOKENS, ANSWER_TOKENS = 64, 112
MOST_TEXT_TEMPERATURE = 0.7
PREFILL_CHUNK = 4096


def write_texts(pair: ModelPair, count: int, temperature: float, seed: int = 0) -> list[OwnText]:
    """Write conversations, with user turns and answers drawn at `temperature`. Raises ValueError for a model whose chat
    template cannot be used."""
    chat = ChatFormat.of(pair.tokenizer)
    opening, closing = chat.opening, chat.closing
    turns = continued(pair, [opening] * count, temperature, USER_TOKENS, range(seed, seed + count))
    ends = set(pair.tokenizer.eos_ids)
    prompts = [[*opening, *(token for token in turn if token not in ends), *closing] for turn in turns]
    return write_answers(pair, prompts, temperature, seed)


def write_answers(
    pair: ModelPair, prompts: Sequence[Sequence[int]], temperature: float, seed: int = 0
) -> list[OwnText]:
    answers = continued(pair, prompts, temperature, ANSWER_TOKENS, range(seed, seed + len(prompts)))
    return [OwnText((*prompt, *answer), len(prompt)) for prompt, answer in zip(prompts, answers)]


def continued(
    pair: ModelPair, prompts: Sequence[Sequence[int]], temperature: float, tokens: int, seeds: Sequence[int]
) -> list[tuple[int, ...]]:
    """Return answers of the target alone to prompts, decoded in one batch."""
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
    parser.add_argument("--target", type=Path, required=True, help="directory of the target")
    parser.add_argument("--draft", type=Path, required=True, help="directory of the draft")
    parser.add_argument(
        "--temperature",
        type=float,
        action="append",
        help="temperature of the draws; may be repeated; default: 1, 0.7, 0.4",
    )
    parser.add_argument("-n", type=int, default=8, help="number of rows of a tree; default: %(default)s")
    parser.add_argument("-k", type=int, default=5, help="number of tokens of a row; default: %(default)s")
    parser.add_argument(
        "--exponent", type=float, default=1.0, help="exponent gamma of coupled drafting; default: %(default)s"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument(
        "--distance", type=int, default=8, help="number of tokens between two contexts; default: %(default)s"
    )
    parser.add_argument(
        "--json", type=Path, help="write the contexts, and how many tokens each tree contains, to this file"
    )
    parser.add_argument(
        "--draft-dtype",
        action="append",
        choices=DTYPES,
        help="type of the draft; may be repeated; default: float32, on a GPU bfloat16",
    )
    given = parser.parse_args()
    plain = "bfloat16" if given.device == "cuda" else "float32"
    pair = ModelPair.load(given.target, given.draft, dtype=DTYPES[plain], device=given.device)
    size = pair.tokenizer.size
    draft = SourcePair.of("files", given.target, given.draft).draft
    trees = {
        name: TreeDraft(draft.load(dtype=DTYPES[name], device=given.device), size, given.n, given.exponent)
        for name in given.draft_dtype or [plain]
    }
    record: dict[str, list[dict]] = {}
    for temperature in given.temperature or (1.0, 0.7, 0.4):
        found = record[f"{temperature:g}"] = []
        held: dict[str, list[int]] = {name: [] for name in trees}
        written_at = min(temperature, MOST_TEXT_TEMPERATURE)
        if given.target.resolve() == demo.TARGET.resolve():
            texts = write_answers(pair, problem_prompts(pair.tokenizer, given.texts, seed=0), written_at)
        else:
            texts = write_texts(pair, given.texts, written_at)
        for text in texts:
            seed = sum(len(each["held"]) for each in found)
            drawn = draw_next(pair.target, text.contexts(given.distance), given.k, temperature, seed, size)
            for name, tree in trees.items():
                held[name] += tree.held(drawn, temperature)
            first = next(iter(held.values()))
            found.append(as_record(text, drawn, first[len(first) - len(drawn) :]))
        for line in lines_of(held):
            print(f"temperature {temperature:g}, {line}, tokens of {given.k}", flush=True)
        if given.json:
            given.json.write_text(json.dumps(record))


def lines_of(held: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """Yield a line for each type of the draft: the mean over contexts with its standard error, and the difference from
    the first type."""
    first = next(iter(held.values()))
    for name, counts in held.items():
        line = f"{name}: {mean_with_error(counts)}"
        if counts is not first:
            line += f", less the first {mean_with_error([own - other for own, other in zip(counts, first)], 3)}"
        yield f"{line} on {len(counts)} contexts"


def mean_with_error(counts: Sequence[int], digits: int = 2) -> str:
    error = statistics.stdev(counts) / len(counts) ** 0.5
    return f"{statistics.mean(counts):.{digits}f} +- {error:.{digits}f}"


def as_record(text: OwnText, drawn: Sequence[DrawnContinuation], held: Sequence[int]) -> dict:
    """Return one text as a record in the file of --json."""
    return {
        "tokens": text.tokens,
        "answer_from": text.answer_from,
        "drawn": [[each.context.size, each.tokens, each.seed] for each in drawn],
        "held": list(held),
    }


if __name__ == "__main__":
    main()
