"""Writes a trained draft as a checkpoint that any `--assistant_model` accepts, with its card."""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from ..config import SpecConfig
from ..device import Device
from ..engine import SpeculativeEngine
from ..models import compact

_MODULE = "modeling_compact"
BLOCK = 2  # drafted tokens of the verification that is timed


def write(student: Any, tokenizer: Any, directory: Path, values: dict[str, Any]) -> None:
    """Writes weights (bfloat16, safetensors), config, tokenizer and README into `directory`.

    Args:
        student: The draft, as trained; not modified.
        tokenizer: The target's.
        directory: An existing directory.
        values: What `distill` found out, for the card.
    """
    with tempfile.TemporaryDirectory(dir=directory) as name:
        made = Path(name)
        state = {key: _narrow(value) for key, value in student.state_dict().items()}
        del state["lm_head.weight"]  # tied
        student.save_pretrained(made, state_dict=state)
        settings = json.loads((made / "generation_config.json").read_text("utf-8"))
        settings["num_assistant_tokens"] = values["best_k"]  # read by whoever drafts with it
        _write(made / "generation_config.json", settings)
        config = json.loads((made / "config.json").read_text("utf-8")) | {"torch_dtype": "bfloat16"}
        if isinstance(student, compact.CompactLlamaForCausalLM):
            shutil.copyfile(compact.__file__, made / f"{_MODULE}.py")
            config["auto_map"] = {
                "AutoConfig": f"{_MODULE}.CompactLlamaConfig",
                "AutoModelForCausalLM": f"{_MODULE}.CompactLlamaForCausalLM",
            }
        _write(made / "config.json", config)
        tokenizer.save_pretrained(made)
        (made / "README.md").write_text(card(values), "utf-8")
        for file in made.iterdir():
            file.chmod(0o644)
            os.replace(file, directory / file.name)


def card(values: dict[str, Any]) -> str:
    """Returns the model card."""
    kept = values["vocab_subset"]
    kinds = "\n".join(f"| {k} | {v:.2f} |" for k, v in values["agreement_by_kind"].items())
    curve = "\n".join(
        f"| {entry['step']} | {entry['loss']:.3f} | {entry['agreement']:.3f} |"
        for entry in values["history"]
    )
    size = f"{kept} ids" if kept else "all ids"
    return f"""# A draft for {values["target"]}

Made by `gaudi-spec distill`: a Llama of {values["layers"]} layers, width {values["hidden"]},
{values["parameters"] / 1e6:.1f} M parameters, {size}, trained on {values["text_tokens"]} tokens
that the target wrote, towards the target's own probabilities (forward KL on its likeliest
candidates), for {values["steps"]} of {values["planned_steps"]} planned steps, in
{values["minutes"]} minutes altogether; seed {values["seed"]}.

A draft step takes {values["cost"]:.3f} of a plain step of the target, and verifying {BLOCK}
tokens {values["verify"]:.2f}, measured on the machine that trained it. With K =
{values["best_k"]} that makes {values["expected_speedup"]:.2f}x plain decoding on the held-out
prompts: computed from these figures, not measured. Agreement is the share of the target's greedy
tokens, on prompts that nobody trained on, that the draft would have proposed.

| kind of prompt | agreement |
|---|---|
{kinds}
| all | {values["agreement"]:.3f} |

| step | loss | agreement |
|---|---|---|
{curve}

It is worse where the target is less sure of itself: names, numbers, rare words, and text unlike
that of the prompts above.
"""


@torch.no_grad()
def costs(
    target: Any, student: Any, device: Device, compile_: str, tokens: int = 48
) -> dict[str, float]:
    """Measures, on one row and through the engine, what drafting and verifying cost.

    Returns:
        "cost": seconds of a draft step, and "verify": seconds of verifying 4 tokens, both in plain
        steps of the target. Both models in float32 on the CPU, in bfloat16 elsewhere.
    """
    dtype = torch.float32 if device.name == "cpu" else torch.bfloat16
    models = [copy.deepcopy(model).to(dtype) for model in (target, student)]
    config = SpecConfig(
        compile=compile_, fuse_cycle=False, num_assistant_tokens=BLOCK, max_length=128
    )
    prompt = [list(range(3, 19))]
    times = []
    for draft in (None, models[1].eval()):
        engine = SpeculativeEngine(models[0], draft, config, device)
        engine.generate(prompt, tokens)
        for _ in range(3):
            engine.generate(prompt, tokens)
            report, seconds = engine.report, engine.report.seconds
            drafted = max(report.draft_forwards, 1)
            times.append((seconds["verify"] / report.cycles, seconds["draft"] / drafted))
    plain = sorted(verify for verify, _ in times[:3])[1]
    verify, draft = (sorted(column)[1] for column in zip(*times[3:]))
    return {"cost": draft / plain, "verify": verify / plain}


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", "utf-8")


def _narrow(value: torch.Tensor) -> torch.Tensor:
    value = value.detach().cpu()
    return value.to(torch.bfloat16) if value.is_floating_point() else value
