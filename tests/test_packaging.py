"""Which files an installation gets, and what importing them costs. The wheel itself is tried by .ci/run."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import torchext

ROOT = Path(__file__).parent.parent


def _python(program: str, *options: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    command = [sys.executable, *options, "-c", program]
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **(env or {})}, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()


@pytest.fixture
def checkout_without_link(tmp_path: Path) -> Path:
    """As on systems without symbolic links."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "callbacks", folder / "callbacks", ignore=ignored)
    shutil.copytree(ROOT / "torchext", folder / "torchext", symlinks=True, ignore=ignored)
    (folder / "torchext" / "callbacks").unlink()
    return folder


def test_version_is_that_of_the_metadata() -> None:
    assert torchext.__version__ == importlib.metadata.version("torchext")


def test_all_names_are_there() -> None:
    for name in torchext.__all__:
        assert getattr(torchext, name)
        assert name in dir(torchext)
    with pytest.raises(AttributeError, match="no attribute 'no_such_part'"):
        torchext.no_such_part  # noqa: B018


def test_callbacks_are_found_from_the_checkout_alone() -> None:
    # -S: no site-packages, so no installation of torchext either. The current folder is first on the path.
    program = "import torchext.callbacks; print(torchext.callbacks.__name__, torchext.callbacks.__file__)"
    name, file = _python(program, "-S", cwd=ROOT).split()
    assert name == "torchext.callbacks"
    assert Path(file).resolve() == ROOT / "callbacks" / "__init__.py"


def test_callbacks_are_found_from_elsewhere(tmp_path: Path) -> None:
    assert _python("import torchext.callbacks as c; print(c.__name__)", cwd=tmp_path) == "torchext.callbacks"


def test_a_checkout_without_links_installs_the_same_packages(checkout_without_link: Path, tmp_path: Path) -> None:
    _setup(checkout_without_link, "build_py", "--build-lib", str(tmp_path / "out"))
    installed = {path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*") if path.is_file()}
    wanted = {
        path.relative_to(ROOT)
        for pattern in ("**/*.py", "**/*.pyi", "**/py.typed", "**/*.safetensors")
        for path in (ROOT / "torchext").glob(pattern)
    }
    wanted |= {Path("torchext", path.relative_to(ROOT)) for path in (ROOT / "callbacks").rglob("*.py")}
    assert installed == wanted


def test_without_a_compiler_the_build_succeeds_without_the_core(checkout_without_link: Path, tmp_path: Path) -> None:
    said = _setup(checkout_without_link, "build_ext", "--build-lib", str(tmp_path / "out"), CC="false", CXX="false")
    assert 'building extension "torchext._native" failed' in said
    assert not list(tmp_path.rglob("*.so"))


def _setup(folder: Path, *command: str, **env: str) -> str:
    # In an installation these are started by the build frontend through the same setup.py.
    result = subprocess.run(
        [sys.executable, "setup.py", *command],
        cwd=folder,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=200,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def test_importing_brings_in_no_optional_package() -> None:
    optional = _modules_of_extras()
    assert {"lightning", "matplotlib"} <= optional
    program = """if True:
        import sys, torch
        before = set(sys.modules)
        import torchext, torchext.losses
        print(*{name.partition(".")[0] for name in set(sys.modules) - before})
    """
    imported = set(_python(program).split())
    assert "torchext" in imported
    assert not imported & optional


def _modules_of_extras() -> set[str]:
    requirements = importlib.metadata.requires("torchext") or []
    named = {re.split(r"[^\w.-]", text)[0].lower() for text in requirements if "extra ==" in text}
    modules = {
        module
        for module, distributions in importlib.metadata.packages_distributions().items()
        if named & {distribution.lower() for distribution in distributions}
    }
    # The self-reference torchext[lightning] within an extra.
    return modules - {"torchext"} | {"pyverbs", "gymnasium", "ale_py"}


def test_a_folder_of_the_same_name_does_not_hide_the_installed_package(tmp_path: Path) -> None:
    # As where a program is started in the folder that holds the clone.
    (tmp_path / "torchext").mkdir()
    program = "import torchext, torchext.callbacks, torchext.losses; print(torchext.__version__)"
    assert _python(program, cwd=tmp_path) == torchext.__version__
