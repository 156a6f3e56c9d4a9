"""Builds the native core: one shared library without Python's API, so that a wheel serves every Python."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
NATIVE = "loaders/native"
SOURCES = sorted(f"{NATIVE}/{path.name}" for path in (ROOT / NATIVE).glob("*.c"))
HEADERS = sorted(f"{NATIVE}/{path.name}" for path in (ROOT / NATIVE).glob("*.h"))
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
    "-Wmissing-prototypes",
    "-fstack-protector-strong",
    "-U_FORTIFY_SOURCE",
    "-D_FORTIFY_SOURCE=2",
    "-g0",
    f"-ffile-prefix-map={ROOT}=.",  # no path of this machine in the library
]
LINKING = [] if sys.platform == "darwin" else ["-Wl,-z,relro,-z,now", "-Wl,-s"]
_JPEG = """
#include <stdio.h>
#include <jpeglib.h>
#include <jerror.h>
#ifndef LIBJPEG_TURBO_VERSION
#error another libjpeg
#endif
int probe(j_decompress_ptr jpeg, JDIMENSION *first, JDIMENSION *columns)
{
    jpeg_crop_scanline(jpeg, first, columns);
    jpeg_skip_scanlines(jpeg, 1);
#if JPEG_LIB_VERSION >= 70
    return jpeg->min_DCT_h_scaled_size + jpeg->comp_info[0].DCT_v_scaled_size + JCS_EXT_RGB + JERR_OUT_OF_MEMORY;
#else
    return jpeg->min_DCT_scaled_size + jpeg->comp_info[0].DCT_scaled_size + JCS_EXT_RGB + JERR_OUT_OF_MEMORY;
#endif
}
"""
"""What the library uses of libjpeg-turbo that other versions may lack."""

PROBES = {
    "int probe(void) { return 0; }": (
        "a C compiler (Debian and Ubuntu: apt-get install gcc libc6-dev), or set CC to yours"
    ),
    _JPEG: (
        "libjpeg-turbo's headers (Debian: apt-get install libjpeg62-turbo-dev; Ubuntu: libjpeg-turbo8-dev), or set "
        "CPATH and LIBRARY_PATH to where they are; of version 2 or later"
    ),
}
"""Small programs that must compile and link, and what to install if one does not."""


class CompileFirst(build):
    """Build the library before anything else, so that nothing is printed after the reason why it cannot be built."""

    sub_commands = sorted(build.sub_commands, key=lambda command: command[0] != "build_ext")


class BuildLibrary(build_ext):
    """Name the library for ctypes, not for one Python's `import`."""

    def build_extensions(self) -> None:
        for program, remedy in PROBES.items():
            if not self._compiles(program):
                sys.exit(f"Drivetrain's native library cannot be built: install {remedy}.")
        super().build_extensions()

    def _compiles(self, program: str) -> bool:
        """Whether the compiler and the linker of the build make a library of this program."""
        compiler = self.compiler
        with tempfile.TemporaryDirectory() as folder:
            source, compiled, linked = (str(Path(folder, name)) for name in ("probe.c", "probe.o", "probe.so"))
            Path(source).write_text(program)
            headers = [f"-I{place}" for place in compiler.include_dirs]
            libraries = [f"-L{place}" for place in compiler.library_dirs] + ["-ljpeg"] * ("jpeg" in program)
            steps = (
                [*compiler.compiler_so, *headers, "-c", source, "-o", compiled],
                [*compiler.linker_so, compiled, "-o", linked, *libraries],
            )
            try:
                return all(subprocess.run(step, capture_output=True, check=False).returncode == 0 for step in steps)
            except OSError:  # there is no such program
                return False

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".dylib" if sys.platform == "darwin" else ".so"))

    def get_export_symbols(self, _: Any) -> list[str]:
        return []


class PlatformWheel(bdist_wheel):
    """Tag the wheel with the platform, and with any Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


os.chdir(ROOT)  # setuptools reads pyproject.toml, and the paths above, from there
setup(
    script_name="setup.py",  # not a module of the package, whose folder it is in
    ext_modules=[
        Extension(
            "drivetrain.loaders.native.libdrivetrain",
            SOURCES,
            depends=[*HEADERS, "setup.py"],
            libraries=["jpeg", "m"],
            extra_compile_args=FLAGS,
            extra_link_args=LINKING,
        )
    ],
    cmdclass={"build": CompileFirst, "build_ext": BuildLibrary, "bdist_wheel": PlatformWheel},
)
