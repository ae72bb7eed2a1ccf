"""What the adapters say where their library is missing, and that nothing else needs it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LIBRARIES = {"neuralforecast": "neuralforecast", "pytorch_forecasting": "pytorch-forecasting"}


@pytest.mark.parametrize(("module", "extra"), LIBRARIES.items())
def test_the_error_names_what_to_install(module: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for loaded in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, f"torchext.losses.{module}", raising=False)
    with pytest.raises(ImportError, match=rf"needs {extra} .*pip install 'torchext\[{extra}\]'"):
        importlib.import_module(f"torchext.losses.{module}")


def test_torchext_losses_imports_neither_library() -> None:
    code = f"import sys, torchext.losses; assert not {{*{list(LIBRARIES)}, 'pandas', 'lightning'}} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200, cwd=ROOT)
