"""Both engines under sanitizers: the stress programs of this folder, built with each and run.

    python -m tests.collectives.sanitize

It takes some minutes, needs g++ and setarch(8), and ends with what a sanitizer says, if one does.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
CORE = HERE.parents[1] / "torchext" / "csrc" / "collectives"

# program -> the parts of the core that it is about
PROGRAMS = {
    "stress.cpp": ["engine", "matching", "progress", "faults", "deadlock", "reduce"],
    "order_stress.cpp": ["order", "order_progress", "order_faults", "order_deadlock"],
}
SANITIZERS = ["thread", "address,undefined"]
NUM_RANKS = [2, 3, 4]
DEADLINE_S = 600.0  # of each build and each run


def build(program: str, sanitizer: str, folder: Path) -> Path:
    """Builds a program; raises CalledProcessError with what the compiler said."""
    binary = folder / f"{Path(program).stem}-{sanitizer}"
    flags = ["-std=c++20", "-O1", "-g", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-pthread"]
    sources = [str(HERE / program), *(str(CORE / f"{name}.cpp") for name in PROGRAMS[program])]
    command = ["g++", *flags, "-o", str(binary), *sources]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE_S)
    return binary


def run(binary: Path, num_ranks: int, num_programs: int) -> str:
    """Runs one; returns its last line, or raises CalledProcessError with what the sanitizer said."""
    # Without randomized addresses: ThreadSanitizer takes no other layout on some kernels.
    command = ["setarch", "-R", str(binary), str(num_ranks), str(num_programs)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE_S)
    return done.stdout.splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs the engines' stress programs under sanitizers.")
    parser.add_argument("--programs", type=int, default=100, help="random programs in each run")
    args = parser.parse_args()
    for tool in ("g++", "setarch"):
        if shutil.which(tool) is None:
            sys.exit(f"needs {tool}, which is not on the PATH")
    with tempfile.TemporaryDirectory() as folder:
        for sanitizer in SANITIZERS:
            for program in PROGRAMS:
                try:
                    binary = build(program, sanitizer, Path(folder))
                    for num_ranks in NUM_RANKS:
                        last = run(binary, num_ranks, args.programs)
                        print(f"{sanitizer}: {program}, {num_ranks} ranks: clean ({last})", flush=True)
                except subprocess.CalledProcessError as error:
                    sys.exit(f"{sanitizer}: {program}: status {error.returncode}\n{error.stdout}{error.stderr}")


if __name__ == "__main__":
    main()
