"""Certificates for tests, made by the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Certificates:
    """A directory of certificates and keys. There are two authorities: the first signed the server's and the client's
    certificate, the second the stranger's."""

    folder: Path

    def __getitem__(self, name: str) -> Path:
        return self.folder / name


def make_certificates(folder: Path) -> Certificates:
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command is not installed; it makes the certificates for this test")
    for authority, names in (("ca", ("server", "client")), ("other_ca", ("stranger",))):
        _openssl(
            folder,
            "req",
            "-x509",
            *_new_key(authority),
            "-out",
            f"{authority}.crt",
            "-days",
            "2",
            "-subj",
            f"/CN={authority}",
        )
        for name in names:
            (folder / f"{name}.ext").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
            _openssl(folder, "req", *_new_key(name), "-out", f"{name}.csr", "-subj", f"/CN={name}")
            signed_by = ("-CA", f"{authority}.crt", "-CAkey", f"{authority}.key", "-CAcreateserial")
            _openssl(
                folder,
                "x509",
                "-req",
                "-in",
                f"{name}.csr",
                *signed_by,
                "-out",
                f"{name}.crt",
                "-days",
                "2",
                "-extfile",
                f"{name}.ext",
            )
    return Certificates(folder)


def _new_key(name: str) -> tuple[str, ...]:
    return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", f"{name}.key")


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)
