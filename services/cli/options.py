"""The options that commands share, each defined once. Imports nothing heavy: `--help` must come at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from smc.terminal import option

MODELS, SAMPLING, PARTICLES, ENGINE, MEASURE, OUTPUT = "Models", "Sampling", "Particles", "Engine", "What is measured", "Output"


Target = Annotated[
    Path | None, option(MODELS, "Directory of the target model; with --draft. Default: the demo pair.", "--target", metavar="DIR")
]
Draft = Annotated[Path | None, option(MODELS, "Directory of the draft model; with --target.", "--draft", metavar="DIR")]
Device = Annotated[str, option(MODELS, "Where both models run.", metavar="cpu|cuda")]
Dtype = Annotated[
    str | None,
    option(MODELS, "float32, bfloat16, float16 or fp8. Default: float32 on a CPU, bfloat16 on a GPU.", metavar="TYPE"),
]
TargetDtype = Annotated[
    str | None,
    option(MODELS, "Of the target alone. fp8: its matrices, with a scale for each output; all else is bfloat16.", metavar="TYPE"),
]
DraftDtype = Annotated[str | None, option(MODELS, "Of the draft alone.", metavar="TYPE")]
DraftVocab = Annotated[
    int | None,
    option(MODELS, "Propose from the likeliest N tokens alone, by --draft-vocab-text. Default: all.", "--draft-vocab", metavar="N"),
]
DraftVocabText = Annotated[
    Path | None,
    option(
        MODELS, "A text in UTF-8, like those to be written: its most frequent tokens are proposed.", "--draft-vocab-text", metavar="FILE"
    ),
]

Method = Annotated[
    str | None,
    option(
        SAMPLING,
        "smc: near the target's law, every round at full speed; exact: the target's own answer; target, draft: one model alone. "
        "Default: smc, at temperature 0 exact.",
        metavar="METHOD",
    ),
]
Temperature = Annotated[float | None, option(SAMPLING, "Of the target law. Default: 1; 0 = greedy, not with --method smc.", metavar="T")]
TopK = Annotated[int | None, option(SAMPLING, "Keep the K likeliest tokens; 0 = all.", "--top-k", metavar="K")]
TopP = Annotated[float | None, option(SAMPLING, "Keep the likeliest tokens that hold this mass; 1 = all.", "--top-p", metavar="P")]
MinP = Annotated[float | None, option(SAMPLING, "Drop tokens below this share of the likeliest; 0 = none.", "--min-p", metavar="P")]
Seed = Annotated[int | None, option(SAMPLING, "Same seed, same answer. Default: drawn, and reported.", metavar="SEED")]
MaxTokens = Annotated[
    int | None, option(SAMPLING, "Longest answer. Default: 256, or what the context leaves.", "--max-tokens", metavar="TOKENS")
]
Stop = Annotated[list[str] | None, option(SAMPLING, "String that ends the answer; may be repeated.", "--stop", metavar="TEXT")]
StopTokenIds = Annotated[
    list[int] | None, option(SAMPLING, "Token id that ends the answer; may be repeated.", "--stop-token-id", metavar="ID")
]
IgnoreEos = Annotated[bool, option(SAMPLING, "Go on after the model's end-of-text token.", "--ignore-eos", show_default=False, metavar="")]
Raw = Annotated[bool, option(SAMPLING, "The prompt as plain text, without the chat template.", "--raw", show_default=False, metavar="")]
TimeBudget = Annotated[float | None, option(SAMPLING, "Answer with what there is after this long.", "--time-budget", metavar="SECONDS")]

Particles = Annotated[
    int | None,
    option(PARTICLES, "N, answers grown side by side; of exact, rows of the tree. Default: 8.", "--particles", "-n", metavar="N"),
]
Population = Annotated[
    str | None,
    option(
        PARTICLES,
        "distinct: drawn without replacement; independent: each for itself, and resampled. Default: distinct.",
        metavar="distinct|independent",
    ),
]
MinParticles = Annotated[
    int | None,
    option(PARTICLES, "Particles to keep where KV memory is short. Default: all.", "--min-particles", metavar="N"),
]
DraftTemperature = Annotated[
    float | None, option(PARTICLES, "Of the proposal. Default: --temperature.", "--draft-temperature", metavar="T")
]
Alpha = Annotated[float | None, option(PARTICLES, "Exponent of the target law. Default: 1.", metavar="A")]
EssThreshold = Annotated[
    float | None,
    option(
        PARTICLES,
        "Resample below this share of N effective samples; 0 = never. Independent only. Default: 0.5.",
        "--ess-threshold",
        metavar="SHARE",
    ),
]
Resampling = Annotated[
    str | None,
    option(PARTICLES, "systematic, stratified, residual, multinomial or ssp. Independent only. Default: systematic.", metavar="SCHEME"),
]

Threads = Annotated[
    int | None, option(ENGINE, "CPU threads of torch. Default: 1 for the demo pair, else torch's own.", "--threads", metavar="COUNT")
]
Form = Annotated[
    str | None,
    option(ENGINE, "lockstep: draft, then score; lookahead: at the same time. Default: lookahead.", metavar="FORM"),
]
Block = Annotated[int | None, option(ENGINE, "K, tokens drafted per round. Default: 8.", "--block", "-k", metavar="K")]
Branches = Annotated[
    int | None, option(ENGINE, "F, next blocks drafted per particle; lookahead only. Default: 4.", "--branches", "-f", metavar="F")
]
MaxContext = Annotated[
    int | None, option(ENGINE, "Longest prompt plus answer. Default: what the models were made for.", "--max-context", metavar="TOKENS")
]
NoPrefixCache = Annotated[
    bool,
    option(ENGINE, "Compute every prompt anew, even where another began alike.", "--no-prefix-cache", show_default=False, metavar=""),
]

JsonFlag = Annotated[bool, option(OUTPUT, "Print one JSON object instead.", "--json", show_default=False, metavar="")]

ParticlesList = Annotated[
    list[int] | None,
    option(
        PARTICLES, "N; may be repeated on cuda, and with --advise. Default: 8, with --advise 1 to 32.", "--particles", "-n", metavar="N"
    ),
]
BlockList = Annotated[
    list[int] | None, option(ENGINE, "K; may be repeated. Default: 8 and 5, with --advise 1 to 16.", "--block", "-k", metavar="K")
]
BranchesList = Annotated[
    list[int] | None,
    option(ENGINE, "F of look-ahead; may be repeated. Default: 4, with --advise 1 to 8.", "--branches", "-f", metavar="F"),
]
Advise = Annotated[
    bool,
    option(
        MEASURE,
        "Time costs, then say which split of --gpus and which N, F, K decode --concurrency requests fastest (exact decoding).",
        "--advise",
        show_default=False,
        metavar="",
    ),
]
Gpus = Annotated[int | None, option(MEASURE, "To be split (--advise). Default: all there are, on a CPU 2.", "--gpus", metavar="COUNT")]
AcceptanceOfOne = Annotated[
    float | None,
    option(
        MEASURE,
        "Probability that a single drafted row has the target's next token (--advise). Default: measured on problems.",
        "--acceptance",
        metavar="P",
    ),
]

GridParticles = Annotated[
    list[int] | None,
    option(PARTICLES, "N; may be repeated. Default: of exact 1 4 8 16, of SMC 4 8 16 32.", "--particles", "-n", metavar="N"),
]
GridBlocks = Annotated[
    list[int] | None,
    option(ENGINE, "K; may be repeated. Default: of exact 4 5 8, of SMC 5, in lockstep 8 as well.", "--block", "-k", metavar="K"),
]
GridBranches = Annotated[
    list[int] | None,
    option(ENGINE, "F of look-ahead; may be repeated. Default: of exact 4, from N=16 on 2; of SMC 1 2 4.", "--branches", "-f", metavar="F"),
]
Resume = Annotated[bool, option(OUTPUT, "Go on with the file of --json.", "--resume", show_default=False, metavar="")]
