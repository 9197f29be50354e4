"""Generates `services/pb` from the .proto files; `make proto` and the packaging step run it. Generated code is never
edited."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent
OUT = ROOT.parent / "services" / "pb"


def build(out: Path = OUT) -> list[Path]:
    """Write `<name>_pb2.py`, its types (`.pyi`) and, where there is a service, `<name>_pb2_grpc.py`. Returns what was
    written.

    protoc would place them in packages of the library; their imports are rewritten to `services.pb`.
    """
    import grpc_tools
    from grpc_tools import protoc

    protos = sorted((ROOT / "smc" / "v1").glob("*.proto"))
    out.mkdir(parents=True, exist_ok=True)
    include = Path(grpc_tools.__file__).parent / "_proto"
    outputs = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(["protoc", f"-I{ROOT}", f"-I{include}", *outputs, *map(str, protos)]):
        raise RuntimeError("protoc failed; see its message above")
    written = []
    for file in sorted(out.glob("smc/**/*.py*")):
        text = re.sub(r"^from smc(\.\w+)*\.v1 import", "from services.pb import", file.read_text(), flags=re.MULTILINE)
        target = out / file.name
        target.write_text(text)
        written.append(target)
    shutil.rmtree(out / "smc")
    return written


if __name__ == "__main__":
    for path in build():
        print(path.relative_to(ROOT.parent))
