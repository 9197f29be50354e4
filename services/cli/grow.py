"""`smcserve grow`: a small model in the shape of a large one, as a directory that any server can load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.cli import options
from smc.terminal import err, progress_bar


def grow(
    model: Annotated[Path, typer.Argument(help="Directory of the small model.", metavar="MODEL")],
    directory: Annotated[Path, typer.Argument(help="New directory for the grown one.", metavar="OUT")],
    shape: Annotated[str, options.option(options.MODELS, "A published shape, such as llama-8b.", metavar="SHAPE")],
    dtype: Annotated[str, options.option(options.MODELS, "float32, bfloat16 or float16.", metavar="TYPE")] = "bfloat16",
) -> None:
    """Write a small model in a large shape, the rest zeros: the small one's answers at the large one's cost."""
    from smc.model.linear import DTYPES
    from smc.model.padded import SAVED_DTYPES, save_padded_model
    from smc.model.presets import preset
    from smc.model.weight_map import count_parameters

    large = preset(shape)
    allowed = {name: kind for name, kind in DTYPES.items() if kind in SAVED_DTYPES}
    if dtype not in allowed:
        raise ValueError(f"--dtype {dtype}; allowed: {', '.join(allowed)}")
    with progress_bar() as progress:
        task = progress.add_task(shape)
        config = save_padded_model(
            model,
            large,
            directory,
            dtype=allowed[dtype],
            on_bytes=lambda done, whole: progress.update(task, completed=done, total=whole),
        )
    weights = count_parameters(config)
    size = weights * allowed[dtype].itemsize / 2**30
    err.print(
        f"{directory}: {model} in the shape {shape}, {weights / 1e9:.2f} B weights, {size:.1f} GiB",
        soft_wrap=True,
        markup=False,
    )
