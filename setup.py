"""Packages and native core of torchext; everything else is in pyproject.toml."""

from __future__ import annotations

import sys
from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import find_packages, setup

# Stated baseline: what the compiler assumes for the architecture. No -march=native, so wheels run elsewhere.
_FLAGS = ["/O2"] if sys.platform == "win32" else ["-O3", "-pthread", "-Wall", "-Wextra"]


def _packages() -> list[str]:
    """Lists the packages from the two folders, whether or not the link torchext/callbacks is there.

    Checkouts without symbolic links and source archives lack the link, so it is not relied upon here.
    """
    found = {p for p in find_packages(include=["torchext", "torchext.*"]) if not p.startswith("torchext.callbacks")}
    found |= {f"torchext.{p}" for p in find_packages(include=["callbacks", "callbacks.*"])}
    return sorted(found)


ParallelCompile(default=0).install()  # a compiler per core
setup(
    packages=_packages(),
    package_dir={"torchext": "torchext", "torchext.callbacks": "callbacks"},
    ext_modules=[
        Pybind11Extension(
            "torchext._native",
            sorted(glob("torchext/csrc/**/*.cpp", recursive=True)),
            depends=sorted(glob("torchext/csrc/**/*.hpp", recursive=True)),
            cxx_std=20,
            extra_compile_args=_FLAGS,
            define_macros=[("TORCHEXT_FLAGS", '"' + " ".join(_FLAGS) + '"')],
            # Without a C++20 compiler the installation succeeds and the parts that need the core say so.
            optional=True,
        )
    ],
)
