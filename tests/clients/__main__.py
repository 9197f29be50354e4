"""Other people's clients against `smcserve serve`, in an environment of their own: `python -m tests.clients
[--environment DIR]`.

Not in the gate: what they need is large, and has versions of its own. The demo pair is served with a chat template that
takes every role."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from smc import demo

HERE = Path(__file__).parent
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{{ m.content }}<|eos|>"
    "{% else %}<|user|>{{ m.content }}{% endif %}{% endfor %}<|assistant|>"
)


def environment(folder: Path) -> Path:
    """The Python of an environment with the clients, made if it is not there."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "-r", HERE / "requirements.txt"], check=True)
    return python


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of OpenAI's API of a service on free ports."""
    models = []
    for name, source in (("target", demo.TARGET), ("draft", demo.DRAFT)):
        shutil.copytree(source, folder / name)
        settings = folder / name / "tokenizer_config.json"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))
        models += [f"--{name}", str(folder / name)]
    smcserve = Path(sys.executable).parent / "smcserve"
    command = [smcserve, "serve", *models, "--port", "0", "--http-port", "0", "--served-model-name", "demo"]
    log = folder / "log"
    with log.open("w") as said, subprocess.Popen(command, stderr=said, env=os.environ | {"COLUMNS": "400"}) as service:
        try:
            while not (found := re.search(r"OpenAI's API on (http\S+)", log.read_text())):
                if service.poll() is not None:
                    raise SystemExit(f"the service did not start: {log.read_text()}")
                time.sleep(0.1)
            yield found[1]
        finally:
            service.terminate()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--environment", type=Path, default=HERE / ".venv")
    given, rest = parser.parse_known_args()
    python = environment(given.environment.absolute())
    with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as url:
        suites = sorted(HERE.glob("suite_*.py"))
        options = (
            "-q",
            "-o",
            "addopts=",
            "-o",
            "asyncio_mode=auto",
            "-p",
            "no:cacheprovider",
            "--noconftest",
            "--rootdir",
            folder,
        )
        command = [python, "-m", "pytest", *options, *suites, *rest]
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(command, cwd=folder, env=environ | {"SMCSERVE_URL": url}).returncode


if __name__ == "__main__":
    sys.exit(main())
