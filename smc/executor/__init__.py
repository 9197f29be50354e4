"""Execution on the models' devices: runs prompts and rounds. Schedulers use it. Knows nothing about requests or queues.

For each round the host names the groups that take part and the pages in which keys and values are stored (`RoundPlan`).
Tokens, lengths, weights, selections and block tables stay on the devices. The host reads the results afterwards
(`RoundResult`, `Lineage`), so it may be one round behind. Shapes depend on the plan alone, and batch sizes are padded
to a few values, so that a whole round can be queued on a device or recorded there.

Read `smc.reference.ExactWalk` first: it has the same mathematics without batches. Terms are those of docs/glossary.md,
letters of axes those of `smc`. Below are the steps of a round of exact decoding by walk in look-ahead, in the order in
which the code is best read: eleven files besides this one and the reference, `smc.round.plan` and `tensors` among them,
which explain the fields.

Draft and verify run at the same time, each on the ranks of its model. The target receives the drafted rows after its
pass, the draft the selection after its steps. What is drafted in one round is verified in the next, but for what is
drafted again: selected rows are the target's pending tokens until then (`SlotState.pending_SQ`).

  plan    `smc.scheduler.decode`: `RoundScheduler.launch`, which `Engine.step` calls, `_launch`: groups, pages, keys of
          random numbers -> `RoundPlan`, by `RoundPlanner.plan` in `planner`
  send    `services.link.remote_worker`: `RemotePair.round` sends the plan to the leaders of both models;
          `services.workers.rank`: `lead` receives it, `Rank.carry_out` runs it on each rank, `ResponseSender` answers.
          Without processes `LocalRoundExecutor.round` stands in the place of both
  run     `round_executor`: `OneModelExecutor.round` asks `DraftRunner` or `TargetRunner`, which run the stages below
          and exchange their messages over a `Channel` (`PeerChannel` in `rank`)
  redraft if the plan says so: where a block has one token, after a miss or at the start, a tree from this token; its
          rows become the particles
          -> `DraftedRows`, sent to the target before its pass, and `RedraftReport`
          `redraft.begin_redraft`, `DraftStage.redraft`, `VerifyStage.redrafted`
  draft   `draft`: `DraftStage.draft`
          1. run the last token of each particle, and rank outcomes by coupled drafting -> `CandidateTokens`
          `begin_draft`, `with_inner_nodes`
          2. in each of K steps keep the N F likeliest rows of a group -> `TokenTree`, at last `GrownRows`
          `DraftStage.extend`, `limit_outcomes`, `reparent`
          3. choose by their paths the rows that may be verified next -> `DraftedRows`, sent to the target
          `prune_tree`, `pack_rows`
  verify  `verify`: `VerifyStage.verify`
          one pass over the blocks in flight, with the target's own draw after each token -> `VerifyOutputs`
          `lay_out_blocks`, `lay_out_nodes` if `RoundKind.nodes`, `collect_outputs`
  select  `select`: `SelectStage.select`
          1. how far each block agrees with the draws -> `Matches`; which drafted rows begin there -> `ScoredRows`
          `score_rows`
          2. keep at most N of these rows; after a miss one: the accepted tokens and the target's draw
          -> `RoundSelection`, sent to the draft, and `RoundResult` with the target's `Lineage`
          `apply_selection`
  remap   block tables and pending tokens follow the selection
          target `VerifyStage.remap`: `remap_target`, `advance`
          draft  `DraftStage.remap` -> `DraftReport` with the draft's `Lineage`: `observe_draws`,
          `store_inner_nodes` (candidates that the next round adds as outcomes), `remap_draft`, `advance`
  report  `RoundScheduler._read`, on GPUs while the next round runs: `RequestedRound.result` -> `RoundReports`;
          `_record`: pages by `_remap_pages`, tokens by `_write_tokens`, which takes back what a miss has cut and
          appends the new block; tokens before it and its first are certain (`commit_tokens`), and `ResultReporter`
          streams them

What else these files call, in a walk; no other file need be opened:

  `self.run`                  a forward pass. Without guidance its `begin` and `remap` do nothing; without penalties,
                              biases and masks it changes no logits
  `self.ops.f`                the function `f` in torch; GPUs have kernels of the same names (`triton_ops`)
  `propose_candidates`        `CandidateTokens`: the 32 tokens v of largest log softmax(gamma log q_v + g_v), which is
                              their `share`; g: the target's noise there
  `expand`                    the candidates of largest mass of a group, in order, and always the first that has mass:
                              `parent_X`, a row among `SourceRows`, and `candidate_X`, one of its candidates
  `own_draws`                 argmax(log p_v + g_v), with the keys of plain decoding
  `match_samples`             a group's block that agrees longest with the draws, and the number of its tokens that do,
                              its known first one included
  `grow`                      whether tokens end an answer, and the state of its stop machine after them
  `assign_rows`               the first row that continues a batch index stays there, others take free ones in order
  `NextParticles`             which particle (`ancestor_A`) and which drafted row (`row_A`) a batch index continues
  `stages.run`                runs a stage, on GPUs by replaying its recording
  `REQUESTS`, `RESPONSES`     encode and decode the messages of a link
  `allocate`                  pages for a round; if there are too few, younger requests give up theirs (`preemption`)
  `decide`                    F, K and the number of nodes that are fastest by measured times (`tree_policy`)
  `SequenceGroup`             a request as the scheduler knows it; `begin_round`, `end_round` count its rounds in flight
  `self.slots`                the host's record of the particles, by slot: `tokens_SL`; `length_S`, how many there are,
                              the block in flight included; `block_S`, where that block begins
  `group.drafted`             tokens that its last launched round drafts for a row; `generation`: how often it has
                              released its slots, so that results of rounds before that are left out
  `slots.descend`             lets slots refer to the pages of a lineage, and frees pages that nothing refers to
  `self.shape`                `PagesPerRow`: tokens that the target runs (`target`), pending ones of the draft
                              (`begin`), and those of each branch that are run within the round (`branch`)
  `RoundPages`                a request's pages, by `Stream`: a model's, guided or redrafted rows of their own
  `selected_A`                index, among the rows that `expand` chose, of the one that continues
  `rules`                     `smc.scheduler.methods.Walk`: what differs per kind of decoding on the host"""
