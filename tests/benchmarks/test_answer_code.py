"""The tasks in Python: their solutions pass, other code does not, and code that does not end or wants too much is
stopped."""

from __future__ import annotations

import inspect
import os
import resource
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

import benchmarks
from benchmarks.answer_code import CodeLimits, code_of, passes
from benchmarks.problem_file import read_problems
from tests.benchmarks import code_solutions

TASKS = read_problems(Path(benchmarks.__file__).with_name("code_tasks.jsonl"))
PATIENT = CodeLimits(cpu_seconds=20, wall_seconds=120)
SHORT = CodeLimits(cpu_seconds=1, wall_seconds=60)


def functions() -> list[tuple[str, str]]:
    """Name and source of each solution, in the order of the tasks."""
    found = inspect.getmembers(code_solutions, inspect.isfunction)
    sources = sorted(((name, *inspect.getsourcelines(function)) for name, function in found), key=lambda one: one[2])
    return [(name, "".join(lines)) for name, lines, _ in sources]


def solved(answers: list[str]) -> list[bool]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(partial(passes, limits=PATIENT), answers, [task.answer for task in TASKS]))


def test_every_solution_solves_its_task_and_no_other_function_does():
    names, codes = zip(*functions())
    assert len(TASKS) == len(set(names)) == 60 and {task.check for task in TASKS} == {"python"}
    assert all(f"def {name}(" in task.prompt for name, task in zip(names, TASKS))
    answers = [f"Here it is:\n```python\n{code}```\nIt works." for code in codes]
    assert [name for name, found in zip(names, solved(answers)) if not found] == []
    for body in ("return None", "return args[0]"):
        wrong = solved([f"```python\ndef {name}(*args):\n    {body}\n```" for name in names])
        assert [name for name, found in zip(names, wrong) if found] == []


CODE = "def f():\n    return 1\n"


@pytest.mark.parametrize(
    "text",
    [
        CODE,
        f"```python\n{CODE}```",
        f"```\n{CODE}",
        f"Run:\n```sh\npip install x\n```\n```python\n{CODE}```\n```python\nprint(f() + 1)\n```",
        CODE + 'if __name__ == "__main__":\n    f(input())\n',
        CODE + "print('x' * 10**6)\n",
    ],
)
def test_code_is_found_in_an_answer(text):
    assert "def f" in code_of(text) and passes(text, "assert f() == 1", PATIENT)
    assert not passes(text, "assert f() == 2", PATIENT)


@pytest.mark.parametrize(
    "code",
    [
        "while True:\n    pass",
        "data = bytearray(10 << 30)",
        "data = [0]\nwhile True:\n    data += data",
        "with open('file', 'w') as file:\n    file.write('x')",
        "import pathlib\npathlib.Path('/tmp/smcserve-answer-code').write_text('x')",
        "files = [open('/dev/null') for _ in range(100)]",
        "import os\nos._exit(0)",
        "raise SystemExit(0)",
        "import os\nassert 'PATH' in os.environ or 'HOME' in os.environ",
        "import torch",
        "def f(",
    ],
)
def test_what_does_not_run_to_its_end_within_the_limits_is_wrong(code):
    begin = time.monotonic()
    assert not passes(code, "assert f", SHORT) and not passes(f"{code}\nf = 1", "assert f", SHORT)
    assert time.monotonic() - begin < 90
    file = Path("/tmp/smcserve-answer-code")
    assert not file.exists() or not file.read_bytes()
    file.unlink(missing_ok=True)


def test_who_sleeps_is_stopped():
    begin = time.monotonic()
    assert not passes("import time\ntime.sleep(600)\nf = 1", "assert f", CodeLimits(wall_seconds=1.0))
    assert time.monotonic() - begin < 60


def test_who_writes_without_end_waits():
    """A reader of all that is written would need that much memory."""
    write = "        while True:\n            os.write(each, bytes(1 << 16))"
    text = f"import os\nfor each in range(3, 32):\n    try:\n{write}"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert not passes(f"{text}\n    except OSError:\n        pass", "", CodeLimits(cpu_seconds=1, wall_seconds=2.0))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def namespaces_are_allowed() -> bool:
    child = os.fork()
    if not child:
        import ctypes

        os._exit(bool(ctypes.CDLL(None).unshare(0x50000000)))
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(sys.platform != "linux", reason="limits of other systems do not hold for root")
@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.fork() or os._exit(0)",
        "import subprocess\nsubprocess.run(['/bin/true'])",
        "import os\nos.execv('/bin/true', ['true'])",
        "import os\nos.posix_spawn('/bin/true', ['true'], {})",
        "import threading\nthreading.Thread(target=print).start()",
    ],
)
def test_no_process_and_no_thread_is_started(code):
    """Also as root. A process that left its session would outlive the answer."""
    caught = "\n".join(f"    {line}" for line in code.splitlines())
    assert not passes(f"{code}\nf = 1", "assert f", PATIENT)
    assert passes(f"f = 0\ntry:\n{caught}\nexcept (OSError, RuntimeError):\n    f = 1", "assert f", PATIENT)


def test_there_is_no_network():
    if not namespaces_are_allowed():
        pytest.skip("user namespaces are forbidden here, so the network cannot be taken away")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 5)\nf = 1"
        assert not passes(code, "assert f", PATIENT)
    assert passes("import math\nf = 1", "assert f", PATIENT)
