"""Whether two model directories can serve as target and draft. Reads configs, tokenizers and headers; no weight is
loaded."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from smc.model.config import ModelConfig, compression_of
from smc.model.safetensors_files import stored_bytes
from smc.model.tokenizer import Tokenizer
from smc.model.weight_map import check_weights, count_parameters

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelReport:
    """What one directory holds."""

    config: ModelConfig
    parameters: int
    """Number of weights; a tied matrix counts once."""
    bytes: int
    """Size of the weights as stored."""


@dataclass(frozen=True)
class PairReport:
    """What was found, and everything that stands in the way."""

    target: ModelReport | None
    """None if the directory alone is already refused; the same holds for `draft`."""
    draft: ModelReport | None
    vocab_size: int
    """Logits that the two models share: the smaller of both embeddings. 0 if either model is refused."""
    max_context: int
    """The shorter of both contexts, in tokens. 0 if either model is refused."""
    problems: tuple[str, ...]
    """Empty if the pair can be served."""


def check_pair(target_dir: str | Path, draft_dir: str | Path) -> PairReport:
    """Check each directory alone, then the two against each other. Raises nothing: see `problems`."""
    problems: list[str] = []
    target, target_tokenizer = _check_alone("target", target_dir, problems)
    draft, draft_tokenizer = _check_alone("draft", draft_dir, problems)
    if target_tokenizer and draft_tokenizer:
        problems += _compare(target_tokenizer, draft_tokenizer)
    both = (target.config, draft.config) if target and draft else ()
    return PairReport(
        target=target,
        draft=draft,
        vocab_size=min((config.vocab_size for config in both), default=0),
        max_context=min((config.max_context for config in both), default=0),
        problems=tuple(problems),
    )


def require_pair(target_dir: str | Path, draft_dir: str | Path) -> PairReport:
    """`check_pair`, but raises ValueError with every problem, one a line."""
    report = check_pair(target_dir, draft_dir)
    if report.problems:
        raise ValueError("\n".join(report.problems))
    return report


def _check_alone(role: str, directory: str | Path, problems: list[str]) -> tuple[ModelReport | None, Tokenizer | None]:
    """Weights and tokenizer are checked each for itself, so that one report names the faults of both."""
    report = tokenizer = None
    try:
        report = _report(directory)
    except ValueError as error:
        problems.append(f"{role}: {error}")
    try:
        tokenizer = Tokenizer.load(directory)
    except ValueError as error:
        problems.append(f"{role}: {error}")
    if report and tokenizer and report.config.vocab_size < tokenizer.size:
        problems.append(
            f"{role}: {directory}: vocab_size={report.config.vocab_size} is below the tokenizer's {tokenizer.size} ids"
        )
    return report, tokenizer


def _report(directory: str | Path) -> ModelReport:
    config = ModelConfig.from_hf(directory)
    stored = check_weights(directory, config)
    compression = compression_of(directory)
    if compression is not None and compression.static_inputs:
        logger.warning(
            "%s: its scales of activations are not used; activations stay bfloat16, or get a scale for each row",
            directory,
        )
    return ModelReport(config, count_parameters(config), stored_bytes(stored))


def _compare(target: Tokenizer, draft: Tokenizer) -> list[str]:
    problems = []
    if target.fingerprint() != draft.fingerprint():
        problems.append(
            f"target and draft have different vocabularies ({target.size} and {draft.size} ids); every id must mean the same token in both"
        )
    if target.eos_ids != draft.eos_ids:
        problems.append(
            f"target ends texts at ids {list(target.eos_ids)}, draft at {list(draft.eos_ids)}; they must be the same"
        )
    return problems
