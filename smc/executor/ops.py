"""Operations of a round on a device: `RoundOps` has one method for each operation, in plain torch. CPUs run these. GPUs
run `smc.executor.triton_ops`. Both give the same results: tests compare them, operation by operation."""

from __future__ import annotations

import torch
from torch import Tensor

from smc.executor.draft import DraftOps
from smc.executor.forward import Reader, StaticForward, run_prompt
from smc.executor.graph_runner import StageRunner
from smc.executor.logit_changes import penalise
from smc.executor.sampling import HeadSampling, Sampling
from smc.executor.select import SelectOps, remap_block_table
from smc.executor.verify import VerifyOps
from smc.model.draft_vocab import DraftVocab
from smc.types import Numerics


class RoundOps(DraftOps, VerifyOps, SelectOps):
    """The operations of a round, in plain torch: those of the stages, and what they need of a device. `TritonOps`
    replaces every one of them."""

    penalise = staticmethod(penalise)
    remap_block_table = staticmethod(remap_block_table)

    def numerics(self, reader: Reader) -> Numerics:
        """Return what the bits of results depend on. Of torch's products on a CPU it is not known."""
        return Numerics.FASTEST

    def stage_runner(self, device: torch.device) -> StageRunner:
        """Return the runner of stages on a device: it runs them directly or as CUDA graphs."""
        return StageRunner(device)

    def forward(self, reader: Reader) -> StaticForward:
        """Return the forward pass of few packed rows through a model."""
        return StaticForward(reader.model, reader.pool, reader.rope)

    run_prompt = staticmethod(run_prompt)

    def prompt_logits(self, reader: Reader, hidden_RE: Tensor) -> Tensor:
        """Return next-token logits [R, V] in float32 for hidden states of prompts."""
        return reader.model.logits(hidden_RE)

    def sampling(self, vocab: int) -> Sampling:
        """Return the sampling from logits whose first `vocab` columns are tokens."""
        return Sampling(vocab)

    def prompt_sampling(self, reader: Reader) -> Sampling:
        """Return the sampling from logits after prompts: of first tokens, and of log-probabilities that are reported.
        Keys and distributions may be on the host."""
        return Sampling(reader.vocab_size)

    def head_sampling(self, vocab: DraftVocab, device: torch.device) -> HeadSampling:
        """Return the sampling from the logits of a draft whose head covers only part of the vocabulary."""
        return HeadSampling(self.sampling(len(vocab.ids_M)), vocab, device)
