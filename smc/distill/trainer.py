"""Training of a draft: the losses, one step of it, and the processes that train together. Knows nothing about where
conversations come from, or when training ends.

The target's distributions are computed beside the draft's and are not stored. The gradient of every loss with respect
to the draft's logits has a closed form. It is computed with the loss for a few tokens at a time and multiplied into the
gradient of the hidden states at once, so that logits over the vocabulary exist for the tokens of one chunk only.

p is the target's distribution, q the draft's:

  total variation    1 - sum min(p, q)       probability that a coupled draw of the draft misses: for exact decoding
  chi-square         log sum p^2 / q         log(1 + chi-square), the variance of importance weights: for SMC
  KL                 sum p log(p / q)        has a gradient where the others have none: for the beginning

Local axes: U tokens of a chunk, Z conversations."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from smc.model.decoder import Decoder, RopeTable, hidden_states
from smc.training import Optimizer, OptimizerSettings

logger = logging.getLogger(__name__)

CHUNK_LOGITS = {"cuda": 1 << 28, "cpu": 1 << 24}
"""Maximum number of logits of a chunk, by device."""
MOST_CHUNK = 1 << 14
"""Maximum number of tokens of a chunk. On a GPU every chunk is padded to its full size."""
LOSSES = {
    "tv": "total variation, for exact decoding",
    "chi2": "log(1 + chi-square), for SMC",
    "kl": "KL divergence",
}
KL_AT_END = 0.1
"""Weight of KL at the end of the run: the other losses hardly change tokens to which the draft gives no probability."""
_eager_devices = {"cpu"}
"""Device types on which the loss is computed operation by operation. On GPUs it is compiled to one pass over memory
instead of many, because memory bandwidth limits it."""
TIMEOUT = timedelta(minutes=30)
"""Maximum time that a process waits for another one, which may be writing or measuring."""
ALIGNMENT = 64
"""Widths of rows are multiples of this."""
OPTIMIZER = OptimizerSettings(warmup=30, weight_decay=0.01)
PART_TOKENS = {"cuda": 1 << 14, "cpu": 1 << 12}
"""Maximum number of tokens that run at the same time, padding included, by device."""


@dataclass(frozen=True)
class LossMix:
    """Weights of the losses, which are added."""

    tv: float = 0.0
    chi2: float = 0.0
    kl: float = 0.0


def mix_at(loss: str, progress: float, kl_until: float) -> LossMix:
    """Return the weights of the losses: KL alone at first, then more and more of `loss`, up to the fraction `kl_until`
    of the run."""
    if loss == "kl":
        return LossMix(kl=1.0)
    other = (1 - KL_AT_END) * (min(1.0, progress / kl_until) if kl_until else 1.0)
    return LossMix(kl=1 - other, **{loss: other})


def divergence(p_logits_UV: Tensor, q_logits_UV: Tensor, weights_3: Tensor, has_chi2: bool) -> tuple[Tensor, Tensor]:
    """Compute the loss and its gradient with respect to the draft's logits. Returns [2, U], the loss and the overlap
    sum min(p, q), and the gradient [U, V]. `weights_3`: weights of tv, chi2 and kl."""
    logp_UV = torch.log_softmax(p_logits_UV.float(), -1)
    logq_UV = torch.log_softmax(q_logits_UV.float(), -1)
    p_UV, q_UV = logp_UV.exp(), logq_UV.exp()
    tv, chi2, kl = weights_3.unbind()
    below_UV = q_UV < p_UV
    overlap_U = torch.minimum(p_UV, q_UV).sum(-1)
    below_U1 = torch.where(below_UV, q_UV, 0.0).sum(-1, keepdim=True)
    kl_U = torch.where(p_UV > 0, p_UV * (logp_UV - logq_UV), 0.0).sum(-1)
    loss_U = tv * (1 - overlap_U) + kl * kl_U
    gradient_UV = tv * q_UV * (below_U1 - below_UV.float()) + kl * (q_UV - p_UV)
    if has_chi2:
        ratio_UV = 2 * logp_UV - logq_UV
        log_sum_U1 = torch.logsumexp(ratio_UV, -1, keepdim=True)
        loss_U = loss_U + chi2 * log_sum_U1[:, 0]
        gradient_UV = gradient_UV + chi2 * (q_UV - (ratio_UV - log_sum_U1).exp())
    return torch.stack((loss_U, overlap_U)), gradient_UV


def _scaled_divergence(
    p_logits_UV: Tensor, q_logits_UV: Tensor, weights_3: Tensor, scale: Tensor, has_chi2: bool
) -> tuple[Tensor, Tensor]:
    """`divergence` with a scaled gradient in the type of the logits."""
    values_2U, gradient_UV = divergence(p_logits_UV, q_logits_UV, weights_3, has_chi2)
    return values_2U, (scale * gradient_UV).to(q_logits_UV.dtype)


@cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(_scaled_divergence, dynamic=False)


def _divergence_on(device: str, *arguments: Tensor | bool) -> tuple[Tensor, Tensor]:
    if device not in _eager_devices:
        try:
            return _compiled()(*arguments)
        except torch.OutOfMemoryError:
            raise
        except (ImportError, OSError, RuntimeError) as error:
            words = str(error).splitlines()[:1]
            logger.warning("the loss cannot be compiled and is computed operation by operation: %s", *words)
            _eager_devices.add(device)
    return _scaled_divergence(*arguments)  # type: ignore[arg-type]


def chunk_size(vocab: int, device: str) -> int:
    """Return the number of tokens of a chunk: a power of two."""
    return min(MOST_CHUNK, max(16, 1 << (CHUNK_LOGITS[device] // vocab).bit_length() - 1))


def raw_gradient(model: Decoder, logits_UV: Tensor, gradient_UV: Tensor) -> Tensor:
    """Convert a gradient with respect to logits to one with respect to the head's products, the input of
    `Decoder.finish_logits`."""
    divisor, cap = model.config.logit_divisor, model.config.logit_cap
    if cap is not None:
        gradient_UV = gradient_UV * (1 - (logits_UV / cap).square())
    return gradient_UV if divisor == 1.0 else gradient_UV / divisor


@torch.no_grad()
def head_loss(
    target: Decoder, draft: Decoder, p_hidden_TE: Tensor, q_hidden_TE: Tensor, vocab: int, mix: LossMix, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums over tokens of the loss and of the overlap, and the gradient [T, E] of `scale` times the loss
    with respect to the draft's hidden states. The gradient of the draft's head, if it is trained, is added to its
    `grad`."""
    device = q_hidden_TE.device.type
    size = chunk_size(vocab, device)
    head = draft.lm_head
    weight_VE = head.weight[:vocab]
    weights_3 = torch.tensor([mix.tv, mix.chi2, mix.kl], device=q_hidden_TE.device)
    scale_1 = torch.tensor([scale], device=q_hidden_TE.device)
    sums_2 = torch.zeros(2, device=q_hidden_TE.device)
    gradient_TE = torch.zeros_like(q_hidden_TE)
    head_VE = torch.zeros(head.weight.shape, device=q_hidden_TE.device) if head.weight.requires_grad else None
    for begin in range(0, len(q_hidden_TE), size):
        p_hidden_UE, q_hidden_UE = p_hidden_TE[begin : begin + size], q_hidden_TE[begin : begin + size]
        count = len(q_hidden_UE)
        if device == "cuda" and count < size:  # the compiled function has one shape
            p_hidden_UE, q_hidden_UE = (
                torch.cat((hidden, hidden.new_zeros(size - count, hidden.shape[1])))
                for hidden in (p_hidden_UE, q_hidden_UE)
            )
        p_logits_UV = _finished(target, target.lm_head(p_hidden_UE))[:, :vocab]
        q_logits_UV = _finished(draft, head(q_hidden_UE))[:, :vocab]
        values_2U, gradient_UV = _divergence_on(device, p_logits_UV, q_logits_UV, weights_3, scale_1, mix.chi2 != 0)
        sums_2 += values_2U[:, :count].sum(1)
        gradient_UV = raw_gradient(draft, q_logits_UV, gradient_UV)[:count].to(q_hidden_TE.dtype)
        gradient_TE[begin : begin + size] = gradient_UV @ weight_VE
        if head_VE is not None:
            head_VE[:vocab] += gradient_UV.t() @ q_hidden_TE[begin : begin + size]
    if head_VE is not None:
        head_VE = head_VE.to(head.weight.dtype)
        head.weight.grad = head_VE if head.weight.grad is None else head.weight.grad + head_VE
    return sums_2[0], sums_2[1], gradient_TE


def _finished(model: Decoder, product_UV: Tensor) -> Tensor:
    return product_UV if model.plain_logits else model.finish_logits(product_UV.float())


@dataclass(frozen=True)
class Ranks:
    """This process, as one of `count` that train together. The methods are collective: every process calls them in the
    same order."""

    rank: int = 0
    count: int = 1
    control: Any = None
    """Process group for values on the CPU."""

    @staticmethod
    def join(rank: int, count: int, rendezvous: Path, on_gpu: bool) -> Ranks:
        """Join the other processes through the file `rendezvous`, which must not exist yet."""
        if count == 1:
            return Ranks()
        # Processes of one host need no network.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.FileStore(str(rendezvous), count)
        if on_gpu:
            torch.cuda.set_device(rank)
        dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=count, timeout=TIMEOUT)
        control = dist.new_group(backend="gloo", timeout=TIMEOUT) if on_gpu else dist.group.WORLD
        return Ranks(rank, count, control)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Replace gradients by their sums over all processes, in float32."""
        if self.count == 1:
            return
        flat = torch.cat([gradient.flatten().float() for gradient in gradients])
        dist.all_reduce(flat)
        begin = 0
        for gradient in gradients:
            gradient.copy_(flat[begin : begin + gradient.numel()].view_as(gradient))
            begin += gradient.numel()

    def sum(self, value: float) -> float:
        """Return the sum over all processes. A single process gets its value as it is: a conversion of its type would
        change the last bits of what is trained."""
        if self.count == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total, group=self.control)
        return total.item()

    def first(self, value: Any) -> Any:
        """Return the value of the first process."""
        if self.count == 1:
            return value
        held = [value]
        dist.broadcast_object_list(held, src=0, group=self.control)
        return held[0]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, in order."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value, group=self.control)
        return found

    def leave(self) -> None:
        if self.count > 1:
            dist.destroy_process_group()


@dataclass(frozen=True)
class TrainingSettings:
    """Hyperparameters. Raises ValueError naming the field."""

    loss: str = "tv"
    """Loss to train with, chosen by the draft's purpose: one of `LOSSES`."""
    kl_until: float = 0.3
    """Fraction of the run over which the loss replaces KL."""
    batch: int = 64
    """Number of conversations of a step, over all processes."""
    optimizer: OptimizerSettings = OPTIMIZER

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise ValueError(f"loss={self.loss!r}; allowed: {', '.join(LOSSES)}")
        if not self.batch > 0:
            raise ValueError(f"batch={self.batch}; allowed: above 0")
        if not 0 <= self.kl_until <= 1:
            raise ValueError(f"kl_until={self.kl_until}; allowed: 0 to 1")


@dataclass(frozen=True)
class StepResult:
    """Results of one step."""

    overlap: Tensor
    """Sum over the answer tokens of this process's share of a batch, on its device."""
    tokens: int
    """Number of answer tokens of all processes."""


class Trainer:
    """Trains a draft on conversations of its target."""

    def __init__(
        self, target: Decoder, draft: Decoder, vocab: int, width: int, settings: TrainingSettings, ranks: Ranks
    ) -> None:
        """`width`: maximum number of tokens of a conversation."""
        self._target, self._draft, self._vocab, self._settings, self._ranks = target, draft, vocab, settings, ranks
        self._device = target.embed.weight.device
        width = -(-width // ALIGNMENT) * ALIGNMENT
        self._p_rope, self._q_rope = (RopeTable(model.config, width, self._device).table for model in (target, draft))
        self.optimizer = Optimizer(draft.parameters(), settings.optimizer)

    def step(self, rows_Z: np.ndarray, step: int, progress: float) -> StepResult:
        """Learn from this process's share of a batch; `progress`: the completed fraction of the run."""
        result = self.gradients(rows_Z, progress)
        self.optimizer.step(step, progress)
        return result

    def gradients(self, rows_Z: np.ndarray, progress: float) -> StepResult:
        """Compute the gradients of the mean loss over the answer tokens of all processes."""
        self.optimizer.clear()
        mix = mix_at(self._settings.loss, progress, self._settings.kl_until)
        tokens = self._ranks.sum(rows_Z["is_answer"][:, 1:].sum())
        overlap = torch.zeros((), device=self._device)
        for tokens_RL, index_T in parts_of(rows_Z, self._device):
            with torch.no_grad():
                p_hidden_TE = hidden_states(self._target, self._p_rope, tokens_RL).flatten(0, 1)[index_T]
            q_hidden_TE = hidden_states(self._draft, self._q_rope, tokens_RL).flatten(0, 1)[index_T]
            _, part_overlap, gradient_TE = head_loss(
                self._target,
                self._draft,
                p_hidden_TE,
                q_hidden_TE.detach(),
                self._vocab,
                mix,
                1 / max(1.0, tokens),
            )
            q_hidden_TE.backward(gradient_TE)
            overlap = overlap + part_overlap
        self._ranks.sum_gradients(self.optimizer.gradients)
        return StepResult(overlap, int(tokens))


def parts_of(rows_Z: np.ndarray, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield token ids [R, L] of conversations of similar length, and the flat indices [T] of the tokens before those
    that are predicted."""
    most = PART_TOKENS[device.type]
    rows_Z = rows_Z[np.argsort(-rows_Z["length"], kind="stable")]
    begin = 0
    while begin < len(rows_Z):
        width = -(-int(rows_Z["length"][begin]) // ALIGNMENT) * ALIGNMENT
        part_R = rows_Z[begin : begin + max(1, most // width)]
        begin += len(part_R)
        tokens_RL = np.zeros((len(part_R), width), np.int64)
        size = min(width, part_R["tokens"].shape[1])
        tokens_RL[:, :size] = part_R["tokens"][:, :size]
        before_RL = np.zeros((len(part_R), width), bool)
        before_RL[:, : size - 1] = part_R["is_answer"][:, 1:size]
        index_T = np.flatnonzero(before_RL)
        yield torch.from_numpy(tokens_RL).to(device), torch.from_numpy(index_T).to(device)


def answer_states(model: Decoder, tokens_RL: Tensor, index_T: Tensor) -> Tensor:
    """Return the hidden states [T, E] from which answer tokens are predicted. Its arguments are what `parts_of`
    yields."""
    rope = RopeTable(model.config, tokens_RL.shape[1], tokens_RL.device)
    return hidden_states(model, rope.table, tokens_RL).flatten(0, 1)[index_T]
