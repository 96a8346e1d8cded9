"""Traces of PyTorch's profiler, with the flags of Optimum Habana."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator

from torch import profiler

DIRECTORY = "hpu_profile/generate"


@contextlib.contextmanager
def traced(args: argparse.Namespace) -> Iterator[Callable[[], None]]:
    """Yields what ends a step; after `profiling_steps` of them a trace lies in `DIRECTORY`.

    Args:
        args: With the `profiling_*` flags; without steps nothing is traced.
    """
    if args.profiling_steps < 1:
        yield lambda: None
        return
    steps = profiler.schedule(
        wait=0, warmup=args.profiling_warmup_steps, active=args.profiling_steps, repeat=1
    )
    with profiler.profile(
        schedule=steps,
        on_trace_ready=profiler.tensorboard_trace_handler(DIRECTORY),
        record_shapes=args.profiling_record_shapes,
    ) as running:
        yield running.step
