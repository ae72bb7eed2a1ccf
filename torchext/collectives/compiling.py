"""How torch.compile and process groups written in Python get on."""

from __future__ import annotations

from types import FunctionType


def run_as_written(cls: type) -> None:
    """Has torch.compile leave the methods of a process group alone, and all that they call.

    After a graph break Dynamo tries to compile each Python function that the program calls, the methods of our groups
    among them, and fails, for it knows groups as opaque objects. `torch.compiler.disable` would say the same but import
    Dynamo, which takes seconds, and cost microseconds in each call; this is the mark that it leaves.
    """
    import torch._C._dynamo.eval_frame as eval_frame

    if hasattr(eval_frame, "set_code_exec_strategy"):
        skip = eval_frame._FrameAction.SKIP
        strategy = eval_frame._FrameExecStrategy(skip, skip)
        for member in vars(cls).values():
            if isinstance(member, FunctionType):
                eval_frame.set_code_exec_strategy(member.__code__, strategy)
    elif hasattr(eval_frame, "skip_code"):  # until torch 2.6
        for member in vars(cls).values():
            if isinstance(member, FunctionType):
                eval_frame.skip_code(member.__code__)
