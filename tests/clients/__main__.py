"""Third-party clients against `smcserve serve`, in a separate environment: `python -m tests.clients
[--environment DIR]`.

Not part of the gate, because the clients' packages are large and pin versions of their own. The demo pair is served
with a chat template that accepts every role. With `--target DIR --draft DIR`, the pair of `benchmarks.real_pair`, the
template renders tools as Qwen's does, and only LangChain's suite runs, with tools and structured output."""

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

TOOLS = """\
{%- set first = messages[0].content if messages[0].role == 'system' else 'You are a helpful AI assistant.' %}
{{- '<|im_start|>system\n' + first }}
{%- if tools %}
    {{- '\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}
    {%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments within ' }}
    {{- '<tool_call></tool_call> XML tags:\n<tool_call>\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
HERE = Path(__file__).parent
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{{ m.content }}<|eos|>"
    "{% else %}<|user|>{{ m.content }}{% endif %}{% endfor %}<|assistant|>"
)


def environment(folder: Path) -> Path:
    """Return the Python of an environment with the clients, which is created if it does not exist."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "-r", HERE / "requirements.txt"], check=True)
    return python


@contextmanager
def served(folder: Path, pair: tuple[Path, Path], template: str) -> Iterator[str]:
    """Run a service on free ports and yield the URL of its OpenAI API. `pair`: directories of target and draft."""
    models = []
    for name, source in zip(("target", "draft"), pair):
        shutil.copytree(source, folder / name)
        settings = folder / name / "tokenizer_config.json"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": template}))
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
    parser.add_argument("--target", type=Path)
    parser.add_argument("--draft", type=Path)
    given, rest = parser.parse_known_args()
    has_tools = given.target is not None
    pair = (given.target, given.draft) if has_tools else (demo.TARGET, demo.DRAFT)
    python = environment(given.environment.absolute())
    with tempfile.TemporaryDirectory() as folder, served(Path(folder), pair, TOOLS if has_tools else TEMPLATE) as url:
        suites = [HERE / "suite_langchain.py"] if has_tools else sorted(HERE.glob("suite_*.py"))
        options = (
            "-q",
            "-o",
            "addopts=",
            "-o",
            "asyncio_mode=auto",
            # LangChain keeps connections open between tests.
            "-o",
            "asyncio_default_test_loop_scope=session",
            "-o",
            "asyncio_default_fixture_loop_scope=session",
            "-p",
            "no:cacheprovider",
            "--noconftest",
            "--rootdir",
            folder,
        )
        command = [python, "-m", "pytest", *options, *suites, *rest]
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(
            command, cwd=folder, env=environ | {"SMCSERVE_URL": url, "SMCSERVE_TOOLS": "1" * has_tools}
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
