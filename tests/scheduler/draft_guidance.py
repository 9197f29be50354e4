"""What guiding the draft, too, brings on the shipped pair: `python -m tests.scheduler.draft_guidance`.

What docs/quality.md says of it is drawn from, in two tables. The first is of laws: at every position of the target's
own guided answers, its guided law p is compared with the draft's law q, as it is and by the same formula after the same
prompts. The second is of whole requests: as they are, with `guide_draft`, and where there is one with a
`draft_temperature` of T / s. Takes half an hour.

Axes: T answer tokens, V vocabulary.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from smc import demo
from smc.api.engine_config import EngineConfig
from smc.api.outputs import Answer
from smc.api.request import Request
from smc.api.sampling_params import SamplingParams
from smc.demo import MAX_ANSWER
from smc.demo.problems import Problem, generate, grade
from smc.evaluation.quality import derived_seed
from smc.local_engine import ModelPair, local_engine
from smc.model.decoder import Decoder
from tests.model.dense import dense_logits

PROBLEM_SEED, FEW, BESIDE = 5, 8, 8
CONFIG = EngineConfig(block=5, branches=4)
AWAY = {
    "start token": None,
    "empty question": "",
    "another question": "Tom has 12 apples. He buys 5 more. How many apples does Tom have now?",
}
"""What is led away from: the default, and chats."""
HOW = {
    "walk N=1": {"method": "exact", "particles": 1},
    "walk N=8": {"method": "exact", "particles": 8},
    "rejection N=1": {"method": "exact", "particles": 1, "verification": "rejection"},
    "rejection N=4": {"method": "exact", "particles": 4, "verification": "rejection"},
    "distinct N=8": {"particles": 8},
}


@dataclass(frozen=True)
class Guidance:
    """How requests are guided; `away`: one of `AWAY`."""

    scale: float
    temperature: float
    away: str

    def __str__(self) -> str:
        return f"| {self.temperature:g} | {self.scale:g} | {self.away} |"


def ask(pair: ModelPair, problems: list[Problem], guidance: Guidance, **how: object) -> list[Request]:
    def tokens(text: str) -> tuple[int, ...]:
        return tuple(pair.tokenizer.chat([{"role": "user", "content": text}]))

    away, law = AWAY[guidance.away], {"temperature": guidance.temperature, "guidance_scale": guidance.scale}
    return [
        Request(
            str(i),
            tokens(problem.question),
            SamplingParams(seed=derived_seed(1, i), max_tokens=MAX_ANSWER, **law, **how),
            negative_prompt=None if away is None or guidance.scale == 1 else tokens(away),
        )
        for i, problem in enumerate(problems)
    ]


def answered(pair: ModelPair, asked: list[Request]) -> list[Answer]:
    """In the order of the requests."""
    rows = BESIDE * max(one.params.rows * one.params.slots_per_row for one in asked)
    engine = local_engine(pair, replace(CONFIG, max_slots=rows, max_chains=rows))
    found = {output.answer.request_id: output.answer for output in engine.run(asked) if output.answer}
    return [found[one.request_id] for one in asked]


def log_law(
    model: Decoder, scale: float, temperature: float, prompts: list[list[int]], answer: tuple[int, ...]
) -> Tensor:
    """log p [T, V] of every answer token after both prompts, by the formula."""
    own_TV, theirs_TV = (
        dense_logits(model, torch.tensor([*prompt, *answer]))[len(prompt) - 1 : -1].double() for prompt in prompts
    )
    return torch.log_softmax((theirs_TV + scale * (own_TV - theirs_TV)) / temperature, -1)


def compared(logp_TV: Tensor, logq_TV: Tensor) -> Tensor:
    """Of every token [3, T]: the overlap 1 - TV of the two laws, and p of the draft's likeliest token and of its
    likeliest few."""
    p_TV = logp_TV.exp()
    likely_TV = p_TV.gather(1, logq_TV.topk(FEW, -1).indices)
    return torch.stack((torch.minimum(p_TV, logq_TV.exp()).sum(-1), likely_TV[:, 0], likely_TV.sum(-1)))


@torch.inference_mode()
def laws(pair: ModelPair, problems: list[Problem], guidance: Guidance) -> str:
    """A row of the first table: of the draft's law as it is, guided, and as it is at a lower temperature."""
    asked, found = ask(pair, problems, guidance, method="target"), []
    away = list(asked[0].negative_prompt or (pair.tokenizer.start_id,))
    scale, temperature = guidance.scale, guidance.temperature
    for one, answer in zip(asked, answered(pair, asked)):
        prompts = [list(one.prompt), away]
        logp_TV = log_law(pair.target, scale, temperature, prompts, answer.tokens)
        drafts = ((1.0, temperature), (scale, temperature), (1.0, temperature / scale))
        found.append(
            torch.stack([compared(logp_TV, log_law(pair.draft, *law, prompts, answer.tokens)) for law in drafts])
        )
    means = torch.cat(found, -1).mean(-1).T.tolist()
    return f"{guidance} {' | '.join(' / '.join(f'{value:.3f}' for value in values) for values in means)} |"


def requests(pair: ModelPair, problems: list[Problem], guidance: Guidance, name: str) -> str:
    """A cell of the second table: tokens a round of exact decoding, of SMC what is solved; by each of the drafts that
    there can be."""
    cells = []
    lower = {"draft_temperature": guidance.temperature / guidance.scale}
    for draft in ({}, {"guide_draft": True}, *([] if "walk" in name else [lower])):
        done = answered(pair, ask(pair, problems, guidance, **draft, **HOW[name]))
        if "method" in HOW[name]:
            rounds = sum(answer.statistics.rounds for answer in done)
            cells.append(f"{sum(len(answer.tokens) - 1 for answer in done) / rounds:.2f}")
        else:
            cells.append(
                f"{sum(grade(problem, answer.text) for problem, answer in zip(problems, done)) / len(done):.0%}"
            )
    return " / ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=24)
    parser.add_argument("--temperature", type=float, action="append", help="may be repeated; default: 1, 1.5")
    parser.add_argument("--away", choices=AWAY, action="append", help="may be repeated; default: all")
    given = parser.parse_args()
    pair, problems = ModelPair.load(demo.TARGET, demo.DRAFT), generate(PROBLEM_SEED, given.problems, "test")
    ways = [
        Guidance(s, t, away) for t in given.temperature or (1.0, 1.5) for s in (1.5, 3.0) for away in given.away or AWAY
    ]
    print(f"| T | s | away from | 1 - TV | likeliest | {FEW} likeliest |\n(as it is / guided / as it is, at T / s)")
    for guidance in ways:
        print(laws(pair, problems, guidance), flush=True)
    print(f"| T | s | away from | {' | '.join(HOW)} |\n(as it is / guided / as it is, at T / s)")
    for guidance in ways:
        print(f"{guidance} {' | '.join(requests(pair, problems, guidance, name) for name in HOW)} |", flush=True)


if __name__ == "__main__":
    main()
