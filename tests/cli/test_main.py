"""The command itself: help, version, and how the process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from services.cli import main

COMMAND = [sys.executable, "-c", "from services.cli.main import main; main()"]


def test_help_names_every_command(smcserve):
    for arguments in ((), ("--help",)):
        ran = smcserve(*arguments)
        assert ran.code == 0
        assert all(command in ran.out for command in ("generate", "demo", "eval", "check", "Examples"))


def test_options_are_grouped(smcserve):
    text = smcserve("generate", "--help").out
    assert all(f"─ {panel} ─" in text for panel in ("Models", "Sampling", "Particles", "Engine", "Output"))


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), (["bench", "--device", "cuda", "--load", "random"], 2)])
def test_what_needs_no_model_loads_no_model_library(words, code):
    """Help and refused options appear without the delay of importing torch."""
    script = (
        f"import sys; from services.cli.main import run; assert run({words!r}) == {code}; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


def test_what_needs_no_service_loads_no_library_of_services():
    """Both models in this process: neither Ray nor gRPC, which take seconds to import. In one process, as importing
    torch takes most of the time."""
    commands = [
        ["bench", "--concurrency", "1", "--rounds", "1"],
        ["generate", "--max-tokens", "1", "a"],
        ["check"],
        ["eval", "--problems", "1", "--speed-problems", "0", "--only", "draft"],
    ]
    script = (
        "import sys\nfrom services.cli.main import run\n"
        f"for words in {commands!r}:\n"
        "    assert run(words) == 0, words\n"
        "    assert not {'ray', 'grpc'} & sys.modules.keys(), words\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("command", ["eval", "bench", "grow", "timeline"])
def test_commands_that_measure_need_a_checkout(smcserve, monkeypatch, command):
    """The wheel does not hold the package `benchmarks`."""
    for name in ("benchmarks", "benchmarks.cli"):
        monkeypatch.setitem(sys.modules, name, None)
    ran = smcserve(command, "--help")
    assert ran.code == 2 and f"smcserve {command} needs the package benchmarks" in ran.err and "checkout" in ran.err


def test_version(smcserve):
    assert smcserve("--version").out == "smcserve 0.1.0\n"


def test_unknown_command(smcserve):
    ran = smcserve("generte")
    assert ran.code == 2 and ran.err.startswith("error: No such command 'generte'") and "smcserve --help" in ran.err


def test_interrupt_is_quiet(smcserve, monkeypatch):
    def interrupted(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "app", interrupted)
    assert (smcserve("demo").code, smcserve("demo").err) == (130, "")


def test_ctrl_c_in_a_process():
    command = [*COMMAND, "eval", "--problems", "100000"]
    # As a shell starts it in the foreground: background processes inherit an ignored Ctrl-C.
    heeding = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heeding)
    try:
        time.sleep(4)
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in err


@pytest.mark.slow
def test_a_reader_that_leaves():
    process = subprocess.Popen(
        [*COMMAND, "generate", "hello", "--seed", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=60) == 1 and "Traceback" not in err and "Exception" not in err
