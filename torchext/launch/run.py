"""``torchext run``: starts the workers of one node and sees them through."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import shutil
import signal
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.elastic import events
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousParameters, RendezvousTimeoutError
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, parse_min_max_nnodes

from torchext.launch import arguments
from torchext.launch.agent import Agent
from torchext.launch.errors import LaunchError
from torchext.launch.folders import write_whole
from torchext.launch.keeper import ask_for_end_with_parent, guarded, keep
from torchext.launch.logs import Logs
from torchext.launch.rendezvous import Rendezvous, meet

logger = logging.getLogger(__name__)


def run(args: argparse.Namespace) -> int:
    """Runs the node's part of a job to its end.

    Call it from the main thread of a process that has no other: it forks (see `torchext.launch.keeper`).

    Args:
        args: What `arguments.parser` has read.

    Returns:
        0 when all workers have; 1 when the job has failed or could not start, as torchrun has it; 128 + N when signal
        N has ended it.
    """
    try:
        arguments.check(args)
    except LaunchError as error:
        print_error(error)
        return 1
    return keep(lambda: _run_agent(args), grace_s=arguments.grace_s(args), signals=_signals(args))


def print_error(error: Exception) -> None:
    """Says on standard error what went wrong."""
    sys.stderr.write(f"torchext run: {error}\n")


def _signals(args: argparse.Namespace) -> list[signal.Signals]:
    names = getattr(args, "signals_to_handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT").split(",")
    numbers = (getattr(signal, name.strip(), None) for name in names)
    return [number for number in numbers if isinstance(number, signal.Signals)]


def _run_agent(args: argparse.Namespace) -> int:
    # No worker yet, so nothing to end: the default, death, for SIGTERM until torch installs its handlers.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        record(_launch)(args)
    except ChildFailedError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except SignalException as error:
        logger.warning("ended by %s", error.sigval.name)
        return 128 + error.sigval
    except RendezvousTimeoutError:
        low, _ = parse_min_max_nnodes(args.nnodes)
        print_error(LaunchError(f"the {low} nodes of job {args.rdzv_id!r} have not come together in time"))
        return 1
    except RendezvousClosedError:
        print_error(LaunchError(f"job {args.rdzv_id!r} has ended already: another node has failed, or all were done"))
        return 1
    except (LaunchError, ValueError, OSError) as error:
        print_error(error)
        return 1
    return 0


def _launch(args: argparse.Namespace) -> None:
    job = _job_name(args)
    _choose_rendezvous(args)
    node_rank = args.node_rank
    if args.rdzv_backend != "static":
        args.node_rank = 0  # else torch says that it will ignore it, and we do not
    config, entrypoint, entrypoint_args = config_from_args(args)
    warning = arguments.too_few_gpus(config.nproc_per_node)
    if warning:
        logger.warning(warning)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(number.name for number in _signals(args))
    assert config.logs_specs is not None
    logs = Logs(config.logs_specs) if type(config.logs_specs) is DefaultLogsSpecs else config.logs_specs
    spec = _spec(config, entrypoint, entrypoint_args, node_rank)
    endpoint_file = os.environ.pop("TORCHEXT_ENDPOINT_FILE", None)
    if endpoint_file is not None and isinstance(spec.rdzv_handler, Rendezvous):
        write_whole(Path(endpoint_file), f"{args.local_addr}:{spec.rdzv_handler.port}")
    agent = Agent(
        spec,
        logs,
        grace_s=arguments.grace_s(args),
        job=job,
        start_method=config.start_method,
        line_prefix=config.log_line_prefix_template,
    )
    shut_down = True
    try:
        result = agent.run()
        events.record(agent.get_event_succeeded(), config.event_log_handler)
    except SignalException:
        shut_down = False  # only this node leaves; the others may go on
        events.record(agent.get_event_failed(), config.event_log_handler)
        raise
    except Exception:
        events.record(agent.get_event_failed(), config.event_log_handler)
        raise
    finally:
        if shut_down:
            spec.rdzv_handler.shutdown()
    if result is not None and result.is_failed():
        raise ChildFailedError(args.training_script, result.failures)
    if args.log_dir is None and isinstance(logs, Logs):
        shutil.rmtree(logs.root_log_dir, ignore_errors=True)  # a temporary folder with nothing to tell


def _job_name(args: argparse.Namespace) -> str:
    """For log lines: what the user or the queue calls the job, else the script."""
    if "TORCHEXT_JOB" in os.environ:
        return os.environ["TORCHEXT_JOB"]
    named: str = args.rdzv_id if not args.standalone else "none"
    return Path(args.training_script).stem if named == "none" else named


def _choose_rendezvous(args: argparse.Namespace) -> None:
    """Fills in, as torchrun does, where the nodes meet if the user has not said it."""
    _, max_nodes = parse_min_max_nnodes(args.nnodes)
    alone = args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port is None and max_nodes == 1
    if args.standalone or alone:
        args.rdzv_backend = "c10d"
        args.rdzv_endpoint = "localhost:0"
        args.rdzv_id = str(uuid.uuid4())
    if args.master_port is None:
        args.master_port = 29500


def _spec(config: LaunchConfig, entrypoint: Callable[..., Any] | str, args: list[str], node_rank: int) -> WorkerSpec:
    params = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr="localhost" if config.max_nodes == 1 and config.local_addr is None else config.local_addr,
        **config.rdzv_configs,
    )
    if isinstance(entrypoint, str):
        entrypoint, *args = guarded([entrypoint, *args])
    else:
        entrypoint, args = _run_guarded, [str(os.getpid()), *args]
    # What config and specification share has one name in both; what there is differs between versions of torch.
    shared = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(WorkerSpec)
        if hasattr(config, field.name)
    }
    return WorkerSpec(
        **shared,
        local_world_size=config.nproc_per_node,
        entrypoint=entrypoint,
        args=tuple(args),
        rdzv_handler=meet(params, node_rank=node_rank),
    )


def _run_guarded(agent: str, script: str, *args: str) -> None:
    """Runs a script within this worker (``--run-path``)."""
    from torch.distributed.run import run_script_path

    ask_for_end_with_parent(int(agent))
    run_script_path(script, *args)
