"""`smcserve batch`: answers files of requests on a Ray cluster; a run can be resumed."""

from __future__ import annotations

from pathlib import Path

from services.batch.config import BatchConfig, is_url
from services.cli import options
from services.cli.service_options import BatchOptions, fields_of, placed, worker_group_config
from smc.terminal import err, print_error, print_warning

JOB_DIRECTORIES = "working_dir_files"
"""Directory in whose subdirectories Ray keeps each job's copy of its working directory."""


@options.with_options(BatchOptions)
def batch(arguments: BatchOptions) -> int:
    """Answer a file of requests, or a directory of them; the same command resumes where it was stopped. Exit code 1:
    some lines have no answer."""
    import logging

    from services.batch.progress import Display
    from services.batch.run import BatchRun, Stopped
    from services.batch.runner import ServiceLost
    from services.launch.config import AUTO, WorkerGroupError
    from services.launch.logs import TEXT

    logging.basicConfig(level=logging.WARNING, format=TEXT)
    given = options.values_of(arguments)
    config = BatchConfig(**fields_of(BatchConfig, given))
    given = placed({"worker_groups": AUTO if config.has_parts else 1} | given)
    output = config.output if is_url(config.output) else str(Path(config.output).resolve())
    if JOB_DIRECTORIES in Path(output).parts:
        print_warning(
            f"{output} is in this job's own copy of its working directory, which Ray deletes; give an absolute path"
        )
    try:
        progress = BatchRun(config, worker_group_config(given), given.get("ray_address"), Display(err)).run()
    except Stopped as error:
        print_error(str(error))
        return 128 + error.number
    except (WorkerGroupError, ServiceLost, ConnectionError) as error:
        print_error(f"{error}; run the same command again to resume")
        return 1
    err.print(f"{progress.summary()}; answers in {output}", soft_wrap=True, markup=False)
    return 1 if progress.all_failed else 0
