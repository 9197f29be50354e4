"""Operations of a round on a device: `RoundOps` has one method for each operation, in plain torch. CPUs run these. GPUs
run `smc.executor.triton_ops`. Both give the same results: tests compare them, operation by operation."""

from __future__ import annotations

import torch
from torch import Tensor

from smc.algorithm.expansion import assign_rows, expand
from smc.algorithm.selection import select
from smc.algorithm.verification import match_samples
from smc.executor import draft, draft_tree
from smc.executor.forward import Reader, StaticForward, run_prompt
from smc.executor.graph_runner import StageRunner
from smc.executor.masks import apply_mask
from smc.executor.remap import advance, remap_block_table, remap_draft, remap_target
from smc.executor.sampling import HeadSampling, Sampling
from smc.executor.select import apply_selection, score_rows
from smc.executor.state import add_biases
from smc.executor.verify import collect_outputs, lay_out_blocks, lay_out_nodes, verify_chains
from smc.model.draft_vocab import DraftVocab
from smc.types import Numerics


class RoundOps:
    """The operations of a round, in plain torch. `TritonOps` replaces every one of them."""

    # Running models.

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

    # Logits and draws.

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

    add_biases = staticmethod(add_biases)
    apply_mask = staticmethod(apply_mask)

    # Draft.

    begin_draft = staticmethod(draft.begin_draft)
    expand = staticmethod(expand)
    reparent = staticmethod(draft.reparent)
    prune_tree = staticmethod(draft_tree.prune_tree)
    store_inner_nodes = staticmethod(draft_tree.store_inner_nodes)
    limit_outcomes = staticmethod(draft_tree.limit_outcomes)
    with_inner_nodes = staticmethod(draft_tree.with_inner_nodes)
    pack_rows = staticmethod(draft.pack_rows)
    observe_draws = staticmethod(draft.observe_draws)

    # Verify.

    lay_out_blocks = staticmethod(lay_out_blocks)
    lay_out_nodes = staticmethod(lay_out_nodes)
    collect_outputs = staticmethod(collect_outputs)
    verify_chains = staticmethod(verify_chains)
    match_samples = staticmethod(match_samples)

    # Select.

    score_rows = staticmethod(score_rows)
    select = staticmethod(select)
    assign_rows = staticmethod(assign_rows)
    apply_selection = staticmethod(apply_selection)

    # Remap.

    remap_draft = staticmethod(remap_draft)
    remap_target = staticmethod(remap_target)
    advance = staticmethod(advance)
    remap_block_table = staticmethod(remap_block_table)
