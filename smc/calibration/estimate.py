"""Estimates a latency model from the shapes of both models, where none was measured. It orders divisions of GPUs, whose
times differ by factors; no tree size should be chosen by it."""

from __future__ import annotations

from smc.model.config import ModelConfig
from smc.model.parallel import Shard
from smc.model.weight_map import PLAIN_BYTES, rank_bytes
from smc.scheduler.speculation import LatencyCurve, LatencyModel, ModelLatency

BANDWIDTH, ARITHMETIC = 2.8e12, 4e14
"""Bytes and operations a second that kernels reach on an H100."""
LAYER_SECONDS, SUM_SECONDS, SUM_BANDWIDTH = 20e-6, 10e-6, 2e11
"""Seconds of a layer besides reading its weights; seconds of one sum over ranks, of which a layer has two, besides its
bytes; and bytes a second of a sum."""
SIZES = (1, 8, 64, 512, 4096)
"""Rows at which the curves have points."""
OVERHEAD, LINK_SECONDS = 0.3e-3, 0.1e-3
"""Seconds of a round besides the models' passes, and those that messages between two processes add."""


def estimate_pass(config: ModelConfig, degree: int, weight_bytes: float) -> ModelLatency:
    """Estimate a pass of a model on each of `degree` ranks. `weight_bytes`: bytes of a weight."""
    whole = rank_bytes(config, Shard(0, degree), {}) / PLAIN_BYTES
    # The embedding is not read, except for its rows of these tokens; if it is the head, it is.
    weights = whole - (0 if config.tied_embeddings else config.vocab_size * config.hidden_size)

    def seconds(rows: int) -> float:
        one_sum = SUM_SECONDS + PLAIN_BYTES * rows * config.hidden_size / SUM_BANDWIDTH if degree > 1 else 0.0
        products = max(weights * weight_bytes / BANDWIDTH, 2 * weights * rows / ARITHMETIC)
        return products + config.num_layers * (LAYER_SECONDS + 2 * one_sum)

    keys = 2 * PLAIN_BYTES * config.num_layers * config.num_kv_heads * config.head_dim
    return ModelLatency(LatencyCurve(tuple((rows, seconds(rows)) for rows in SIZES)), keys / degree / BANDWIDTH)


def estimate_latency(
    target: ModelConfig, draft: ModelConfig, degrees: tuple[int, int], weight_bytes: tuple[float, float]
) -> LatencyModel:
    """Estimate the latency model of a pair. `degrees` and `weight_bytes`: ranks, and bytes of a weight, of draft and
    target."""
    own, theirs = (estimate_pass(*each) for each in zip((draft, target), degrees, weight_bytes))
    return LatencyModel(own, theirs, theirs, OVERHEAD)
