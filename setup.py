"""Builds the native core: one shared library without Python's API, so that a wheel serves every Python."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = sorted(str(path) for path in Path("loaders/native").glob("*.c"))
HEADERS = sorted(str(path) for path in Path("loaders/native").glob("*.h"))
# No contraction to fused multiply-add: results are the same on every processor. No flags of the build machine: the
# compiler makes variants of the inner loops, and the library chooses between them when it is loaded.
FLAGS = [
    "-std=gnu11",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
]


class BuildLibrary(build_ext):
    """Name the library for ctypes, not for one Python's `import`."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".dylib" if sys.platform == "darwin" else ".so"))

    def get_export_symbols(self, _: Any) -> list[str]:
        return []


class PlatformWheel(bdist_wheel):
    """Tag the wheel with the platform, and with any Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "drivetrain.loaders.native.libdrivetrain",
            SOURCES,
            depends=HEADERS,
            libraries=["jpeg", "m"],
            extra_compile_args=FLAGS,
        )
    ],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel},
)
