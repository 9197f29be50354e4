"""Builds the gRPC modules before the package, also in an editable install; everything else is in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).resolve().parent / "proto"))
from build import build


class BuildWithProtos(build_py):
    def run(self) -> None:
        build()
        super().run()


setup(cmdclass={"build_py": BuildWithProtos})
