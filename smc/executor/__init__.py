"""Execution on the models' devices: runs prompts and rounds. Schedulers use it. Knows nothing about requests or queues.

For each round the host names the groups that take part and the pages in which keys and values are stored (`RoundPlan`).
Tokens, lengths, weights, selections and block tables stay on the devices. The host reads the results afterwards
(`RoundResult`, `Lineage`), so it may be one round behind. Shapes depend on the plan alone, and batch sizes are padded
to a few values, so that a whole round can be queued on a device or recorded there.

Read `smc.reference.ExactWalk` first: it has the same mathematics without batches. Terms are those of docs/glossary.md,
letters of axes those of `smc`, fields those of `smc.round.tensors`. Below are the steps of a round of exact decoding by
walk in look-ahead. Classes without a file are in `round_stages`, files without a package in this one. Functions are the
torch forms; `triton_ops` names the kernel of each.

Draft and verify run at the same time, each on the ranks of its model. The host sends the plan to both
(`services.link.remote_worker.RemotePair.round`), and a rank (`services.workers.rank`) passes it to its runner; in one
process `round_executor.LocalRoundExecutor` does. "Sent" is `Channel.send`, from rank to rank. The target receives the
drafted rows after its pass, the draft the selection after its steps. What is drafted in one round is verified in the
next, but for what is drafted again: selected rows are the target's pending tokens until then
(`smc.round.slot_state.SlotState.pending_SQ`).

  plan    `smc.scheduler.decode.RoundScheduler._launch`: groups, pages, keys of random numbers -> `RoundPlan`
          `smc.scheduler.preemption.Preemption.allocate`, `smc.scheduler.round_plan.RoundPlanner.plan`
  redraft if the plan says so: after a miss, a tree from the target's draw; its rows become the particles
          -> `DraftedRows`, sent to the target before its pass, and `RedraftReport`
          `redraft.begin_redraft`, `DraftStage.redraft`, `VerifyStage.redrafted`
  draft   `model_runner.DraftRunner.draft`, `DraftStage.draft`
          1. run the last token of each particle, and rank outcomes by coupled drafting -> `CandidateTokens`
          `draft.begin_draft`, `DraftStage.run_pending`, `sampling.Sampling.propose_candidates`,
          `draft_tree.with_inner_nodes`
          2. in each of K steps keep the N F likeliest rows of a group -> `TokenTree`, at last `GrownRows`
          `DraftStage.extend`, `draft_tree.limit_outcomes`, `smc.algorithm.expansion.expand`, `draft.reparent`
          3. choose by their paths the rows that may be verified next -> `DraftedRows`, sent to the target
          `draft_tree.prune_tree`, `draft.pack_rows`
  verify  `model_runner.TargetRunner.round`, `VerifyStage.verify`
          one pass over the blocks in flight, with the target's own draw after each token -> `VerifyOutputs`
          `verify.lay_out_blocks`, `verify.lay_out_nodes` if `RoundKind.nodes`, `VerifyStage.run_blocks`,
          `sampling.Sampling.own_draws` -> `TargetDraws`, `verify.collect_outputs`
  select  `SelectStage.select`
          1. how far each block agrees with the draws -> `Matches`; which drafted rows begin there -> `ScoredRows`
          `smc.algorithm.verification.match_samples`, `select.score_rows`
          2. keep at most N of these rows; after a miss one: the accepted tokens and the target's draw
          -> `RoundSelection`, sent to the draft, and `RoundResult` with the target's `Lineage`
          `SelectStage._select_trees`, `smc.algorithm.expansion.expand`, `assign_rows`, `select.apply_selection`
  remap   block tables and pending tokens follow the selection
          target `VerifyStage.remap`: `remap.remap_target`, `remap.advance`
          draft  `DraftStage.remap` -> `DraftReport` with the draft's `Lineage`: `draft.observe_draws`,
          `draft_tree.store_inner_nodes` (candidates from which it may draft again), `remap.remap_draft`, `advance`
  report  `round_executor.RequestedRound.result` -> `RoundReports`; `RoundScheduler._record`
          pages: `smc.scheduler.slots.Slots.descend`; tokens, those of the new block included:
          `RoundScheduler._write_tokens`; those before it and its first are certain and streamed: `commit_tokens`

Methods that differ per kind of decoding on the host are in `smc.scheduler.methods`."""
