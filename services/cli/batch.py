"""`smcserve batch`: a file of requests answered on a Ray cluster, resumable line by line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.cli import gang, options
from smc.terminal import err, print_error, print_warning

BATCH = "Batch"
JOB_DIRECTORIES = "working_dir_files"
"""Where Ray keeps a job's copy of its working directory."""


def batch(
    ctx: typer.Context,
    input: Annotated[
        Path, typer.Argument(help="Requests, JSON lines in the shape of OpenAI's batches.", metavar="IN.jsonl")
    ],
    output: Annotated[
        Path, typer.Argument(help="Answers, in the order of the input; gone on with if it exists.", metavar="OUT.jsonl")
    ],
    overwrite: Annotated[
        bool,
        options.option(BATCH, "Start anew, whatever OUT.jsonl holds.", "--overwrite", show_default=False, metavar=""),
    ] = False,
    seed: Annotated[
        int, options.option(BATCH, "Of lines without a seed of their own, with their custom_id.", metavar="SEED")
    ] = 0,
    concurrency: Annotated[
        int | None,
        options.option(
            BATCH, "Requests in flight. Default: as many as fill the slots.", "--concurrency", "-c", metavar="COUNT"
        ),
    ] = None,
    target: options.Target = None,
    draft: options.Draft = None,
    target_tp: gang.TargetTp = None,
    draft_tp: gang.DraftTp = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = None,
    target_dtype: options.TargetDtype = None,
    draft_dtype: options.DraftDtype = None,
    draft_vocab: options.DraftVocab = None,
    draft_vocab_text: options.DraftVocabText = None,
    form: options.Form = None,
    block: options.Block = None,
    branches: options.Branches = None,
    cohorts: gang.Cohorts = None,
    max_slots: gang.MaxSlots = None,
    max_chains: gang.MaxChains = None,
    max_context: options.MaxContext = None,
    pages: gang.Pages = None,
    prefill_chunk: gang.PrefillChunk = None,
    prefill_share: gang.PrefillShare = None,
    drafting: gang.Drafting = None,
    no_prefix_cache: options.NoPrefixCache = False,
    threads: gang.Threads = None,
    ray_address: gang.RayAddress = None,
    target_resource: gang.TargetResource = None,
    draft_resource: gang.DraftResource = None,
    link: gang.Link = None,
    start_timeout: gang.StartTimeout = None,
    link_timeout: gang.LinkTimeout = None,
    heartbeat: gang.Heartbeat = None,
    max_failed_starts: gang.MaxFailedStarts = None,
    trace: gang.Trace = None,
) -> int:
    """Answer a file of requests; the same command goes on where it was stopped. Exit code 1: some lines have no
    answer."""
    import logging

    from services.batch.config import BatchConfig
    from services.batch.decoder import ServiceLost
    from services.batch.progress import Display
    from services.batch.run import Batch, Stopped
    from services.launch.errors import GangError

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config = BatchConfig(input, output, overwrite, seed, concurrency)
    if JOB_DIRECTORIES in output.resolve().parts:
        print_warning(
            f"{output.resolve()} is in this job's own copy of its working directory, which Ray deletes; give an absolute path"
        )
    try:
        tally = Batch(config, gang.gang_config(ctx.params), ray_address, Display(err)).run()
    except Stopped as error:
        print_error(str(error))
        return 128 + error.number
    except (GangError, ServiceLost, ConnectionError) as error:
        print_error(f"{error}; the same command goes on from here")
        return 1
    err.print(f"{tally.summary()}; answers in {output.absolute()}", soft_wrap=True, markup=False)
    return 1 if tally.all_failed else 0
