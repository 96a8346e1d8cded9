"""Times acceptance and commitment alone, which a cycle's graphs contain but do not time."""

from __future__ import annotations

import statistics

import torch

from .. import cycle
from ..clock import timed
from ..engine import SpeculativeEngine
from .contenders import Call


@torch.no_grad()
def accept_ms(engine: SpeculativeEngine, k: int, call: Call, repetitions: int = 20) -> float:
    """Returns the median milliseconds of processing, judging and committing K + 1 logits a row.

    The engine has run before; its state is overwritten, as by any call.
    """
    runtime = engine.runtime
    assert runtime is not None
    state, rows = runtime.state, runtime.state.batch
    prompt = torch.zeros(2, dtype=torch.long)
    state.reset([prompt] * rows, [state.slots - 2] * rows, 0, list(call.ends), call.sampling)
    runtime.held = [[] for _ in runtime.held]
    rejects = state.rules.structure.verifier == "rejection"
    drawn = rejects and runtime.drafter is not None and runtime.drafter.draws
    block = runtime.blocks.proposal(k, drawn)
    block.n_proposed.zero_()  # a row commits one token each time, and stays inside its buffer
    if block.probs is not None:
        block.probs.fill_(1 / block.probs.shape[-1])
    logits = torch.randn(rows, k + 1, runtime.target.vocab_size).to(state.device)

    def work() -> torch.Tensor:
        index = state.length[:, None] + torch.arange(k + 1, device=state.device)
        processed = state.rules.process(logits, state.text(block.tokens, index))
        verdict, sound = cycle.judge(state.rules, block, processed, index)
        return cycle.commit(state, verdict, block.n_proposed, sound)

    run = engine.device.capture(work) if runtime.captures else work
    return 1000 * statistics.median(timed(engine.device, run, repetitions))
