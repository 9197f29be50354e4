"""Whether guiding the draft, too, would bring anything, on the shipped pair: `python -m tests.engine.draft_guidance`.

What docs/quality.md says of it is drawn from. At every position of the target's own guided answers, the target's guided law p is compared
with the draft's law q, as it is and by the same formula after the same prompts. Takes a minute.

Axes: T answer tokens, V vocabulary.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor

from smc import demo
from smc.demo import MAX_ANSWER
from smc.demo.problems import generate, grade
from smc.engine.local import ModelPair, local_engine
from smc.engine.request import Request, SamplingParams
from smc.evaluation.quality import derived_seed
from smc.models.decoder import Decoder
from smc.runtime.config import EngineConfig
from tests.models.dense import dense_logits

PROBLEM_SEED, BLOCK, FEW = 5, 5, 8


@dataclass(frozen=True)
class Law:
    """How a request is guided."""

    scale: float
    temperature: float


def log_law(model: Decoder, law: Law, prompts: tuple[list[int], list[int]], answer: tuple[int, ...]) -> Tensor:
    """log p [T, V] of every answer token after both prompts, by the formula."""
    own_TV, theirs_TV = (dense_logits(model, torch.tensor([*prompt, *answer]))[len(prompt) - 1 : -1].double() for prompt in prompts)
    return torch.log_softmax((theirs_TV + law.scale * (own_TV - theirs_TV)) / law.temperature, -1)


def compared(logp_TV: Tensor, logq_TV: Tensor, answer: tuple[int, ...]) -> Tensor:
    """Of every token [4, T]: the overlap 1 - TV of the two laws, p of the draft's likeliest token and of its likeliest few, and the tokens
    that a round would confirm of a chain of likeliest tokens, the target's own included."""
    order_TV, p_TV = logq_TV.argsort(-1, descending=True), logp_TV.exp()
    likely_TV = p_TV.gather(1, order_TV[:, :FEW])
    right = (order_TV[:, 0] == torch.tensor(answer)).tolist()
    runs = [next((n for n in range(BLOCK) if not all(right[t : t + n + 1]) or t + n >= len(right)), BLOCK) for t in range(len(right))]
    overlap_T = torch.minimum(p_TV, logq_TV.exp()).sum(-1)
    return torch.stack((overlap_T, likely_TV[:, 0], likely_TV.sum(-1), torch.tensor(runs, dtype=torch.float64) + 1))


@torch.inference_mode()
def measure(pair: ModelPair, problems: int, law: Law, negative: str | None) -> str:
    """A row of the table. `negative`: a question to lead away from; None: the token that begins texts."""
    asked, prompts = [], {}
    away = None if negative is None else tuple(pair.tokenizer.chat([{"role": "user", "content": negative}]))
    stories = generate(PROBLEM_SEED, problems, "test")
    for i, problem in enumerate(stories):
        prompt = tuple(pair.tokenizer.chat([{"role": "user", "content": problem.question}]))
        params = {"method": "target", "max_tokens": MAX_ANSWER, "temperature": law.temperature, "guidance_scale": law.scale}
        params = SamplingParams(seed=derived_seed(1, i), **params)
        asked.append(Request(str(i), prompt, params, negative_prompt=away if params.guided else None))
        prompts[str(i)] = (list(prompt), list(away or (pair.tokenizer.start_id,)))
    engine = local_engine(pair, EngineConfig(max_slots=2 * problems))
    answers = [output.answer for output in engine.run(asked) if output.answer]
    solved = sum(grade(stories[int(answer.request_id)], answer.text) for answer in answers)
    found: dict[float, list[Tensor]] = {1.0: [], law.scale: []}
    for answer in answers:
        logp_TV = log_law(pair.target, law, prompts[answer.request_id], answer.tokens)
        for scale, parts in found.items():
            logq_TV = log_law(pair.draft, Law(scale, law.temperature), prompts[answer.request_id], answer.tokens)
            parts.append(compared(logp_TV, logq_TV, answer.tokens))
    rows = [torch.cat(parts, 1).mean(1).tolist() for parts in found.values()]
    cells = [f"{one:.3f} -> {other:.3f}" for one, other in zip(rows[0], rows[-1])]
    name = "start token" if negative is None else repr(negative)
    return f"| {law.temperature:g} | {law.scale:g} | {name} | {solved / problems:.0%} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    given = parser.parse_args()
    pair = ModelPair.load(demo.TARGET, demo.DRAFT)
    print(f"| T | s | negative | solved | 1 - TV | p(likeliest) | p({FEW} likeliest) | tokens a round, N=1 K={BLOCK} |")
    for scale in (1.0, 1.5, 3.0):
        for negative in (None, "", "Tom has 12 apples. He buys 5 more. How many apples does Tom have now?"):
            if scale > 1 or negative is None:
                print(measure(pair, given.problems, Law(scale, given.temperature), negative), flush=True)


if __name__ == "__main__":
    main()
