"""What ``import torchext`` costs beyond ``import torch``, in fresh processes, interleaved.

    python tests/benchmarks/import_time.py --rounds 10

Prints the median and the spread (lowest to highest) of each import after ``import torch``.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys

_PROGRAM = """
import time
import torch
start = time.perf_counter()
import {module}
print(time.perf_counter() - start)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="processes for each module (default: %(default)s)")
    parser.add_argument("--modules", nargs="+", default=["torchext", "torchext.losses", "torchext.callbacks"])
    options = parser.parse_args()
    times_s: dict[str, list[float]] = {module: [] for module in options.modules}
    for number in range(options.rounds + 1):
        for module, measured in times_s.items():
            command = [sys.executable, "-c", _PROGRAM.format(module=module)]
            elapsed_s = float(subprocess.check_output(command))
            if number:  # the first round fills the caches of the disk
                measured.append(elapsed_s)
    print(f"Python {platform.python_version()}, {platform.platform()}, {options.rounds} rounds")
    for module, measured in times_s.items():
        median, low, high = (1000 * f(measured) for f in (statistics.median, min, max))
        print(f"import {module:<20} {median:8.2f} ms  ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
