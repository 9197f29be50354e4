"""Execution on the models' devices: runs prompts and rounds. Schedulers use it. Knows nothing about requests or queues.

For each round the host names the groups that take part and the pages in which keys and values are stored (`RoundPlan`).
Tokens, lengths, weights, selections and block tables stay on the devices. The host reads the results afterwards
(`RoundResult`, `Lineage`), so it may be one round behind. Shapes depend on the plan alone, and batch sizes are padded
to a few values, so that a whole round can be queued on a device or recorded there.

A round of exact decoding by walk in look-ahead, in the order of its steps. `smc.reference.ExactWalk` has the same
mathematics without batches; classes without a file are in `round_stages`, and files without a package in this one.

  plan    groups, pages, keys of random numbers -> `RoundPlan`
          `smc.scheduler.preemption.Preemption.allocate`, `smc.scheduler.round_plan.RoundPlanner.plan`
  draft   1. run the last token of each particle, and rank outcomes by coupled drafting -> candidates, `TokenTree`
          `model_runner.DraftRunner.draft`, `DraftStage.run_pending`, `sampling.Sampling.propose_candidates`,
          `draft_tree.with_inner_nodes`
          2. in each of K steps keep the N F likeliest rows of a group -> `GrownRows`
          `DraftStage.extend`, `smc.algorithm.expansion.expand`, `draft.reparent`
          3. choose by their paths the rows that may be verified next -> `DraftedRows`, sent to the target
          `draft_tree.prune_tree`, `draft.pack`
  verify  one pass over the blocks in flight, with the target's own draw after each token -> `VerifyOutputs`
          `model_runner.TargetRunner.round`, `verify.lay_out`, `nodes.lay_out_nodes`, `verify.verify`
  select  1. how far each block agrees with the draws, and which drafted rows begin with the outcome -> `Candidates`
          `SelectStage.select`, `smc.algorithm.verification.match_samples`, `select.score_candidates`
          2. keep at most N of these rows; after a miss one: the accepted tokens and the target's draw
          -> `RoundSelection`, sent to the draft, and `RoundResult`
          `SelectStage._select_trees`, `select.apply_selection`
  remap   block tables follow the selection -> `Lineage`; the draft keeps candidates of the new
          blocks' inner nodes
          `remap.remap_target`, `remap.remap_draft`, `draft_tree.store_inner_nodes`
  report  tokens, weights and pages enter the host's record; committed tokens are streamed
          `smc.scheduler.decode.RoundScheduler`, `smc.scheduler.slots.Slots.descend`

Fields of these types are explained in `smc.round.tensors`; methods that differ per kind of decoding on the host are in
`smc.scheduler.methods`."""
