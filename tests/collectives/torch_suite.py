"""torch's own tests of process groups, run over dfccl.

    python -m tests.collectives.torch_suite [--tests test_all_reduce_sum ...] [--backend gloo]

They are those of `torch.testing._internal.distributed` that an installed torch brings, and need the package expecttest.
Prints what became of each; `EXPECTED_FAILURES` says which cannot succeed and why.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import traceback
import unittest
import warnings
from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import torchext  # noqa: F401  registers the backend
from tests.ranks import Rank, run_ranks

WORLD_SIZE = 4

_OWN = "torch's test knows torch's own backends only"
_NEEDS_GPU = "needs GPUs, and skips without them only over torch's own backends"
_GLOO = "torch offers it over gloo alone"
EXPECTED_FAILURES = {
    "test_SyncBatchNorm_process_group": "needs torchvision",
    "test_accumulate_gradients_no_sync": _OWN,
    "test_accumulate_gradients_no_sync_allreduce_hook": _OWN,
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook": _OWN,
    "test_accumulate_gradients_no_sync_grad_is_view": _OWN,
    "test_all_to_all_cuda": _NEEDS_GPU,
    "test_all_to_all_cuda_complex": _NEEDS_GPU,
    "test_all_to_all_full_group_cuda": _NEEDS_GPU,
    "test_barrier_timeout_full_group": "expects a timeout, in gloo's words, where we name the rank that left at once",
    "test_barrier_timeout_global": "makes the default group anew through the environment, which is not set here",
    "test_batch_isend_irecv_mixed_backend_err": "needs NCCL",
    "test_batch_isend_irecv_op_err": _NEEDS_GPU,
    "test_monitored_barrier_gloo": _GLOO,
    "test_monitored_barrier_gloo_rank_0_timeout": _GLOO,
    "test_monitored_barrier_gloo_subgroup": _GLOO,
    "test_sparse_all_reduce_sum": "sparse tensors, which gloo alone takes",
}
# Those that torch itself skips, about half, need GPUs, or are off for all backends.


def base(backend: str, folder: str) -> Any:
    """torch's class of tests; what it reads at its import must be set before."""
    os.environ.update(BACKEND=backend, WORLD_SIZE=str(WORLD_SIZE), TEMP_DIR=folder, INIT_METHOD="env://")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.distributed import distributed_test
    return distributed_test.DistributedTest._DistTestBase


def names(backend: str) -> list[str]:
    return [name for name in dir(base(backend, "")) if name.startswith("test_")]


def run(rank: Rank, backend: str, folder: str, tests: list[str]) -> dict[str, str]:
    """What became of each test on this rank: "passed", or "skipped", "failed" and why."""
    bases = base(backend, folder)
    from torch.testing._internal.common_utils import TestCase

    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")

    class Suite(bases, TestCase):  # type: ignore[misc, valid-type]
        rank = 0
        world_size = WORLD_SIZE

    outcomes = {}
    for name in tests:
        store = dist.PrefixStore(name, rank.store)
        torch.manual_seed(0)
        dist.init_process_group(
            backend, store=store, rank=rank.rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=20)
        )
        test = Suite(name)
        test.rank = rank.rank
        try:
            getattr(test, name)()
            outcomes[name] = "passed"
        except unittest.SkipTest as skip:
            outcomes[name] = f"skipped: {skip}"
        except SystemExit as code:  # how torch's own decorators skip
            outcomes[name] = f"skipped: {code}"
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            outcomes[name] = f"failed: {type(error).__name__}: {error} ({last.filename}:{last.lineno})"
        if dist.is_initialized():
            dist.destroy_process_group()
        store.set(f"ended/{rank.rank}", "")
        store.wait([f"ended/{r}" for r in range(WORLD_SIZE)], timedelta(seconds=60))
    return outcomes


def run_all(backend: str, tests: list[str]) -> list[dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        for name in ("barrier", "test_dir", "init_dir"):
            os.mkdir(f"{folder}/{name}")
        return run_ranks(run, WORLD_SIZE, backend, folder, tests, store="tcp", deadline_s=900)


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs torch's own tests of process groups.")
    parser.add_argument("--backend", default="dfccl")
    parser.add_argument("--tests", nargs="+")
    args = parser.parse_args()
    tests = args.tests or names(args.backend)
    results = run_all(args.backend, tests)
    counts: Counter[str] = Counter()
    for name in tests:
        outcome = next((r[name] for r in results if not r[name].startswith("passed")), "passed")
        counts[outcome.partition(":")[0]] += 1
        print(f"{name}: {outcome}")
    print(dict(counts))


if __name__ == "__main__":
    from tests.collectives import torch_suite  # under the name by which the ranks find its functions

    torch_suite.main()
