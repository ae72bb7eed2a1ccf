"""What importing the losses costs."""

from __future__ import annotations

import subprocess
import sys


def test_import_does_not_load_the_compiler() -> None:
    code = "import sys, torch; before = 'torch._dynamo' in sys.modules; import torchext.losses; "
    code += "assert before or 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
