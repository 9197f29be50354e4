"""Checks that two model directories can serve as target and draft. Reads configs, tokenizers and safetensors headers;
of the weights, it reads only samples of embeddings and heads."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from smc.model.config import ModelConfig, default_dtype, read_quantisation, sampling_defaults
from smc.model.files import StoredTensor, read_headers, stored_bytes, tensor_fingerprint
from smc.model.parallel import Shard, held_sizes, local_config
from smc.model.quantisation import Int4Quantisation, Quantisation
from smc.model.tokenizer import Tokenizer
from smc.model.vocabularies import NAMED, ForeignToken, compare_ordinary, foreign_tokens, name_tokens
from smc.model.weight_map import PLAIN_BYTES, check_weights, count_parameters, int4_formats, rank_bytes, weight_slices
from smc.once import warn_once

logger = logging.getLogger(__name__)
SHARED = ("model.embed_tokens.weight", "lm_head.weight")
STORED_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
DEGREES = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True)
class ModelReport:
    """One valid model directory."""

    config: ModelConfig
    parameters: int
    """Number of weights; a tied matrix counts once."""
    bytes: int
    """Size of the weights on disk."""
    eos_ids: tuple[int, ...] = ()
    """Token ids that end a text."""
    weights: str = ""
    """Storage format of the weights: the title of the quantisation, or the names of the types."""
    gpu_dtype: str = "bfloat16"
    """Name of the dtype that the weights are loaded in on a GPU, unless another is given."""
    gpu_obstacle: str = ""
    """Why a GPU does not run the model in `gpu_dtype`; empty if it does."""
    rank_bytes: dict[int, int] = field(default_factory=dict)
    """Degree of tensor parallelism -> bytes of weights that each rank's GPU holds in `gpu_dtype`. Degrees into which
    the model cannot be split are left out."""
    rank_heads: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """Degree -> query heads and key/value heads of each rank. Every rank allocates memory for as many as the first one
    has."""
    rank_token_bytes: dict[int, int] = field(default_factory=dict)
    """Degree -> bytes of the keys and values of one token on each rank, in bfloat16."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Default sampling settings of requests, by name, from generation_config.json."""


@dataclass(frozen=True)
class PairReport:
    """Result of checking a target and a draft."""

    target: ModelReport | None
    """None if the target directory is invalid."""
    draft: ModelReport | None
    """None if the draft directory is invalid."""
    vocab_size: int
    """Number of logits that both models have: the smaller embedding. 0 if either directory is invalid."""
    max_context: int
    """The shorter maximum context of the two, in tokens. 0 if either directory is invalid."""
    problems: tuple[str, ...]
    """One message for each problem; empty if the pair can be served."""
    shared_ids: int = 0
    """Number of ids that mean the same token in both tokenizers. 0 if there is a problem."""
    foreign: tuple[ForeignToken, ...] = ()
    """The target's other ids, which the draft does not propose."""
    shared_bytes: int = 0
    """Bytes, in bfloat16, of the draft's embedding and untied head if they equal the target's. A process that holds
    both models on one device stores these matrices once."""

    def notes(self, most: int = NAMED) -> tuple[str, ...]:
        """Say how the tokenizers differ where they may, one text for each kind of difference. At most `most` ids are
        named."""
        if self.problems or self.target is None or self.draft is None:
            return ()
        notes, ends = [], [", ".join(map(str, model.eos_ids)) or "none" for model in (self.target, self.draft)]
        if self.foreign:
            notes.append(
                f"the draft does not propose {len(self.foreign):,} of the target's ids, which its tokenizer does not "
                "have or calls by another name (use method=exact for answers that need them; SMC seldom draws them): "
                f"{name_tokens(self.foreign, most)}"
            )
        if ends[0] != ends[1]:
            notes.append(f"texts end at the target's end ids ({ends[0]}), not at the draft's ({ends[1]})")
        return tuple(notes)


def check_pair(target_dir: str | Path, draft_dir: str | Path) -> PairReport:
    """Check each directory, then compare the two. Problems are reported, not raised."""
    problems: list[str] = []
    target, target_tokenizer = _check_directory("target", target_dir, problems)
    draft, draft_tokenizer = _check_directory("draft", draft_dir, problems)
    foreign: tuple[ForeignToken, ...] = ()
    if target_tokenizer and draft_tokenizer:
        problems += compare_ordinary(target_tokenizer, draft_tokenizer)
        foreign = () if problems else foreign_tokens(target_tokenizer, draft_tokenizer)
    both = (target.config, draft.config) if target and draft else ()
    return PairReport(
        target=target,
        draft=draft,
        vocab_size=min((config.vocab_size for config in both), default=0),
        max_context=min((config.max_context for config in both), default=0),
        problems=tuple(problems),
        shared_ids=target_tokenizer.size - len(foreign) if target_tokenizer and not problems else 0,
        foreign=foreign,
        shared_bytes=_shared_bytes(target_dir, draft_dir, *both) if both else 0,
    )


def _shared_bytes(target_dir: str | Path, draft_dir: str | Path, target: ModelConfig, draft: ModelConfig) -> int:
    """Return the bytes, in bfloat16, of the embedding and the untied head that are equal in both directories, as
    samples of the files show."""
    found = 0
    theirs, own = read_headers(target_dir), read_headers(draft_dir)
    for name in SHARED:
        is_used = name == SHARED[0] or not (target.tied_embeddings or draft.tied_embeddings)
        tensors = [stored[name] for stored in (theirs, own) if is_used and name in stored]
        if len(tensors) == 2 and len({tensor_fingerprint(tensor, name) for tensor in tensors}) == 1:
            found += PLAIN_BYTES * math.prod(tensors[0].shape)
    return found


def require_pair(target_dir: str | Path, draft_dir: str | Path) -> PairReport:
    """Like `check_pair`, but raises ValueError with one line for each problem."""
    report = check_pair(target_dir, draft_dir)
    if report.problems:
        raise ValueError("\n".join(report.problems))
    return report


def _check_directory(
    role: str, directory: str | Path, problems: list[str]
) -> tuple[ModelReport | None, Tokenizer | None]:
    """Check weights and tokenizer independently, so that one report lists the problems of both."""
    report = tokenizer = None
    try:
        report = _report(directory)
    except ValueError as error:
        problems.append(f"{role}: {error}")
    try:
        tokenizer = Tokenizer.load(directory)
    except ValueError as error:
        problems.append(f"{role}: {error}")
    if report and tokenizer:
        report = replace(report, eos_ids=tokenizer.eos_ids)
    if report and tokenizer and report.config.vocab_size < tokenizer.size:
        problems.append(
            f"{role}: {directory}: vocab_size={report.config.vocab_size} is below the tokenizer's {tokenizer.size} ids"
        )
    return report, tokenizer


def _report(directory: str | Path) -> ModelReport:
    config = ModelConfig.from_hf(directory)
    stored = check_weights(directory, config)
    quantisation = read_quantisation(directory)
    if quantisation is not None and quantisation.static_inputs:
        warn_once(
            logger,
            "%s: static scales of activations are not used; activations stay bfloat16 or get one scale per row",
            directory,
        )
    if isinstance(quantisation, Int4Quantisation) and quantisation.act_order:
        warn_once(logger, "%s: int4 with act-order is converted to bfloat16 when it is loaded on a GPU", directory)
    dtype = default_dtype(directory, "cuda")
    try:
        on_gpu = _rank_sizes(config.on_device("cuda"), stored, quantisation if dtype == "int4" else None)
    except ValueError as error:
        on_gpu = {"gpu_obstacle": str(error)}
    plain = ", ".join(sorted({STORED_NAMES.get(tensor.dtype, tensor.dtype) for tensor in stored.values()}))
    return ModelReport(
        config,
        count_parameters(config),
        stored_bytes(stored),
        weights=quantisation.title if quantisation else plain,
        gpu_dtype=dtype,
        sampling=sampling_defaults(Path(directory)),
        **on_gpu,
    )


def _rank_sizes(config: ModelConfig, stored: Mapping[str, StoredTensor], int4: Quantisation | None) -> dict[str, Any]:
    """Return `rank_bytes`, `rank_heads` and `rank_token_bytes` of a `ModelReport`, by name, for `DEGREES`. Raises
    ValueError if no single GPU can run the model, whatever its memory."""
    weights, heads, token_bytes = {}, {}, {}
    for degree in DEGREES:
        shard = Shard(0, degree)
        try:
            formats = int4_formats(weight_slices(config, shard), shard, stored, int4) if int4 else {}
            heads[degree] = tuple((query, key) for query, key, _ in held_sizes(config, degree))
        except ValueError:
            if degree == 1:
                raise
            continue  # the model cannot be split into this many shards
        weights[degree] = rank_bytes(config, shard, formats)
        keys = local_config(config, shard).num_kv_heads * config.head_dim
        token_bytes[degree] = 2 * PLAIN_BYTES * config.num_layers * keys
    return {"rank_bytes": weights, "rank_heads": heads, "rank_token_bytes": token_bytes}
