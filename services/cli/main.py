"""The `smcserve` command: its subcommands, and the conversion of errors to one line and an exit code.

Exit codes: 0 success, 1 the work failed, 2 invalid arguments, 130 interrupted.

`smcserve eval`, `bench`, `timeline` and `grow` are commands of the package `benchmarks`, which is in the repository but
not in the wheel. It is imported only when one of them is called."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from services.cli.batch import batch
from services.cli.check import check
from services.cli.client import client
from services.cli.demo import demo
from services.cli.distill import distill
from services.cli.generate import generate
from services.cli.serve import serve
from smc.terminal import USAGE_ERROR, out, print_error

CHECKOUT = Path(__file__).resolve().parents[2]
"""Root of the repository, if this package is in a checkout."""
COMMANDS = {
    "eval": "Measure quality and speed of every way of decoding, on generated problems or on those of a file.",
    "bench": "Measure speed: on GPUs the answer tokens per second of every mode, on a CPU the parts of a round's time.",
    "timeline": "Draw the times at which draft, target and coordinator worked, on one time axis.",
    "grow": "Write a small model into a large shape, padded with zeros. It has the small model's answers "
    "and the large one's cost.",
}
EXAMPLES = """
[bold]Examples[/bold]

  smcserve demo\n
  smcserve generate "Mia has 12 apples. She buys 30 more. How many now?"\n
  smcserve generate --target DIR --draft DIR -n 32 -k 5 -f 2 < prompt.txt\n
  smcserve eval --problems 200 --only target --only "lockstep N=8 K=5"\n
  smcserve check --target DIR --draft DIR
"""
app = typer.Typer(
    help="Answers of a large target model at close to the speed of a small draft model, by Sequential Monte Carlo "
    "speculative decoding.",
    epilog=EXAMPLES,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _measuring(name: str) -> Callable[[typer.Context], int]:
    """Return a command of `benchmarks`, to which all arguments are passed on."""

    def command(ctx: typer.Context) -> int:
        if (CHECKOUT / "benchmarks").is_dir() and str(CHECKOUT) not in sys.path:
            sys.path.insert(0, str(CHECKOUT))
        try:
            from benchmarks.cli import run
        except ModuleNotFoundError as error:
            if error.name not in ("benchmarks", "benchmarks.cli"):
                raise
            raise ValueError(
                f"smcserve {name} needs the package benchmarks, which the wheel does not hold; run it from a checkout "
                "of the repository, installed by pip install -e ."
            ) from error
        return run(name, ctx.args)

    return command


app.command("generate")(generate)
app.command("demo")(demo)
app.command("serve")(serve)
app.command("batch")(batch)
app.command("check")(check)
app.command("distill")(distill)
for name, text in COMMANDS.items():
    pass_on = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    app.command(name, help=text, context_settings=pass_on)(_measuring(name))
app.add_typer(client, name="client")


def _print_version(requested: bool) -> None:
    if requested:
        out.print(f"smcserve {importlib.metadata.version('smcserve')}")
        raise typer.Exit()


Version = Annotated[
    bool, typer.Option("--version", help="Print the version.", metavar="", callback=_print_version, is_eager=True)
]


@app.callback()
def options(version: Version = False) -> None:
    pass


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    try:
        return app(list(arguments) or ["--help"], prog_name="smcserve", standalone_mode=False) or 0
    except USAGE_ERROR as error:
        command = error.ctx.command_path if error.ctx else "smcserve"
        print_error(f"{error.format_message()} (see {command} --help)")
        return 2
    except BrokenPipeError:
        # The reader has gone, as in `| head`. Text that is still buffered must not raise again when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError) as error:
        print_error(str(error))
        return 2
    except (KeyboardInterrupt, typer.Abort):
        return 130


def main() -> None:
    sys.exit(run(sys.argv[1:]))
