"""What an installation must be: the checks of `gaudi-spec doctor`, as pure functions.

Each takes the environment variables and the `Facts`, touches nothing else, and returns `Check`
objects. A *note* works but is worth knowing; a *problem* fails, or does something else than was
asked for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from .version import __version__

TRUE, FALSE = ("1", "on", "true", "y", "yes"), ("", "0", "false", "n", "no", "off")
RECIPES = "PT_HPU_RECIPE_CACHE_CONFIG=PATH,DELETE,MB[,NFS], such as ./recipes,false,4096"
Env = Mapping[str, str]


class Check(NamedTuple):
    """One line of the report.

    Attributes:
        name: What was looked at.
        status: "ok", "note" or "problem".
        text: What was found.
        remedy: What to do about it; empty where nothing is to be done.
    """

    name: str
    status: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.status:8} {self.name:17} {self.text}" + (
            f" Remedy: {self.remedy}" if self.remedy else ""
        )


@dataclass(frozen=True)
class Facts:
    """What checks know of the machine; versions are None where a package is not installed.

    Attributes:
        python: Version.
        torch: Version.
        transformers: Version.
        optimum_habana: Version.
        pin: What optimum-habana demands of transformers, such as "<4.56.0,>=4.55.0".
        bridge: Version of Intel's PyTorch bridge.
        bridge_lazy: The mode that the bridge says it runs in, None where it was not asked.
        requested: The device on the command line.
        device: The device that was chosen, or None.
        why: The reasons against the devices that were not.
        hardware: One line, or None where the device could not be opened.
        memory: GB by name.
        threads: PyTorch's.
        cores: Those that this process may use.
        hl_smi: Whether Intel's tool is on PATH.
        kernel: Why the CPU's kernel for few rows was not built, "" if it was; None elsewhere.
        writable: Whether a directory can be written, or made.
    """

    python: str = "3.12.0"
    torch: str | None = None
    transformers: str | None = None
    optimum_habana: str | None = None
    pin: str | None = None
    bridge: str | None = None
    bridge_lazy: bool | None = None
    requested: str = "auto"
    device: str | None = "cpu"
    why: str = ""
    hardware: str | None = "cpu"
    memory: Mapping[str, float] = field(default_factory=dict)
    threads: int = 1
    cores: int = 1
    hl_smi: bool = False
    kernel: str | None = None
    writable: Callable[[str], bool] = lambda path: True

    @property
    def hpu(self) -> bool:
        """Whether this is about a Gaudi card."""
        return self.device == "hpu"

    def lazy(self, env: Env) -> bool:
        """Returns the bridge's mode, or what the environment says where it was not asked."""
        return env.get("PT_HPU_LAZY_MODE") == "1" if self.bridge_lazy is None else self.bridge_lazy


def numbers(version: str | None) -> tuple[int, ...]:
    """Returns the leading numbers of a version: (4, 55, 4) for "4.55.4.dev0"."""
    return tuple(int(n) for n in re.findall(r"\d+", (version or "").split("+")[0])[:3])


def packages(env: Env, facts: Facts) -> list[Check]:
    """Checks Python and the packages."""
    fits = (3, 10) <= numbers(facts.python) < (3, 14)
    found = [
        Check("Python", "ok", facts.python)
        if fits
        else Check("Python", "problem", f"{facts.python}.", "use Python 3.10 to 3.13."),
        Check("gaudi_spec", "ok", __version__),
        Check("torch", "ok", facts.torch)
        if facts.torch
        else Check(
            "torch", "problem", "Not installed.", "pip install torch, or use Intel's container."
        ),
    ]
    version, remedy = facts.transformers, 'pip install "transformers>=4.55,<6"'
    if version is None:
        found.append(Check("transformers", "problem", "Not installed.", remedy))
    elif numbers(version) < (4, 55):
        found.append(Check("transformers", "problem", f"{version} is older than 4.55.", remedy))
    elif numbers(version) >= (6,):
        found.append(Check("transformers", "note", f"{version} is newer than tested.", remedy))
    else:
        found.append(Check("transformers", "ok", version))
    if facts.optimum_habana is None:
        return [*found, Check("optimum-habana", "ok", "not installed, and not needed")]
    from packaging.specifiers import SpecifierSet

    text = f"{facts.optimum_habana} wants transformers {facts.pin or 'of any version'}"
    if version and not SpecifierSet(facts.pin or "").contains(version, prereleases=True):
        remedy = f'pip install "transformers{facts.pin}", if you use optimum-habana too.'
        return [*found, Check("optimum-habana", "note", f"{text}; found {version}.", remedy)]
    return [*found, Check("optimum-habana", "ok", text)]


def hardware(env: Env, facts: Facts) -> list[Check]:
    """Checks the device and what it runs on."""
    if facts.device is None:
        found = [Check("device", "problem", facts.why, "choose another --device.")]
    else:
        chosen = f"{facts.device} (--device {facts.requested})"
        found = [Check("device", "ok", f"{chosen}; {facts.why}" if facts.why else chosen)]
    if facts.hardware is not None:
        memory = ", ".join(f"{name} {size:.1f} GB" for name, size in facts.memory.items())
        found += [Check("hardware", "ok", facts.hardware)]
        found += [Check("memory", "ok" if memory else "note", memory or "not counted here")]
    elif facts.device is not None:
        remedy = "see whether another process holds the card (hl-smi, nvidia-smi)."
        found += [Check("hardware", "problem", "The device cannot be opened.", remedy)]
    if facts.kernel is not None:
        status, text = ("note", facts.kernel) if facts.kernel else ("ok", "built")
        remedy = "install a C compiler, or name one in CC." if facts.kernel else ""
        found += [Check("few-rows kernel", status, text, remedy)]
    text = f"{facts.threads} of PyTorch's, {facts.cores} cores to run on"
    slow = facts.threads > facts.cores
    remedy = f"OMP_NUM_THREADS={facts.cores}" if slow else ""
    return [*found, Check("threads", "note" if slow else "ok", text, remedy)]


def bridge(env: Env, facts: Facts) -> list[Check]:
    """Checks Intel's bridge and driver."""
    asked = facts.requested in ("auto", "hpu")
    version = facts.bridge or ("of unknown version" if facts.hpu else None)
    lost = "see the line `device` for the reason, or pass --device cpu to go on without the card."
    if version is None:
        found = Check("habana_frameworks", "ok", "not installed")
        if facts.requested == "hpu" or (asked and facts.hl_smi):
            text = "This Python has no habana_frameworks."
            remedy = "use the Python of Intel's container, or venv --system-site-packages."
            found = Check("habana_frameworks", "problem", text, remedy)
    elif facts.hpu or not asked:
        found = Check("habana_frameworks", "ok", version)
    else:
        found = Check("habana_frameworks", "problem", f"{version}, but it cannot be used.", lost)
    if facts.hl_smi or not (facts.hpu or facts.requested == "hpu"):
        text = "hl-smi is on PATH" if facts.hl_smi else "no hl-smi, and no card is used"
        return [found, Check("driver", "ok", text)]
    text, remedy = "hl-smi is not on PATH.", "install habanalabs-firmware-tools to see the card."
    return [found, Check("driver", "note", text, remedy)]


def mode(env: Env, facts: Facts) -> Check:
    """Checks `PT_HPU_LAZY_MODE` against what the bridge runs in."""
    name, value, actual = "mode", env.get("PT_HPU_LAZY_MODE"), facts.bridge_lazy
    words = {True: "lazy", False: "eager", None: "unknown"}
    choose = "export PT_HPU_LAZY_MODE=1 (HPU graphs) or 0 (torch.compile) before Python starts."
    if not facts.hpu:
        return Check(name, "ok", f"not used on {facts.device}" if facts.device else "not used")
    if value not in (None, "0", "1"):
        text = f"PT_HPU_LAZY_MODE={value} means lazy to the bridge and eager to gaudi-spec."
        return Check(name, "problem", text, choose)
    if actual is not None and actual != (value == "1"):
        text = f"PT_HPU_LAZY_MODE is {value or 'not set'}, but the bridge runs {words[actual]}."
        return Check(name, "problem", text, choose)
    if value is None:
        text = "PT_HPU_LAZY_MODE is not set; its default differs between releases (1.19: 1, now: 0)"
        return Check(name, "note", f"{text}.", choose)
    text = "lazy: HPU graphs" if value == "1" else "eager: torch.compile with hpu_backend"
    return Check(name, "ok", f"PT_HPU_LAZY_MODE={value}, {text}")


def recipe_cache(env: Env, facts: Facts) -> Check:
    """Checks the recipe cache on disk."""
    name, bad = "recipe cache", "problem" if facts.hpu else "note"
    value, old = env.get("PT_HPU_RECIPE_CACHE_CONFIG"), env.get("PT_RECIPE_CACHE_PATH")
    if not value:
        if old:
            text = "PT_RECIPE_CACHE_PATH is deprecated."
            return Check(name, "note", text, RECIPES)
        if facts.hpu:
            text = "Not set: every process compiles every recipe again."
            return Check(name, "note", text, RECIPES)
        return Check(name, "ok", "not set")
    path, *rest = value.split(",")
    delete, size, nfs = [part.strip().lower() for part in [*rest, "", "", ""][:3]]
    switches = delete in TRUE + FALSE and nfs in TRUE + FALSE
    if len(rest) > 3 or not switches or not re.fullmatch(r"\d*", size):
        return Check(name, bad, f"PT_HPU_RECIPE_CACHE_CONFIG={value} is malformed.", RECIPES)
    if len(rest) == 3 and facts.bridge and numbers(facts.bridge) < (1, 20):
        text = f"The bridge {facts.bridge} knows three fields, not four."
        return Check(name, bad, text, "leave the fourth (NFS) out.")
    if not path:
        return Check(name, "note", "No path, so there is no cache on disk.", RECIPES)
    if not facts.writable(path):
        return Check(name, bad, f"{path} is not writable.", "name another directory.")
    if delete in TRUE:
        text = f"{path} is emptied at every start."
        return Check(name, "note", text, "set the second field to false to keep recipes.")
    if old:
        text = f"{value}; PT_RECIPE_CACHE_PATH is set too, and overridden."
        return Check(name, "note", text, "unset PT_RECIPE_CACHE_PATH.")
    return Check(name, "ok", value)


def collectives(env: Env, facts: Facts) -> Check:
    """Checks what several cards need."""
    size = env.get("WORLD_SIZE") or env.get("OMPI_COMM_WORLD_SIZE") or "1"
    several = size.isdigit() and int(size) > 1
    set_ = env.get("PT_HPU_ENABLE_LAZY_COLLECTIVES", "").lower() in ("1", "true")
    if several and facts.hpu and facts.lazy(env) and not set_:
        text = f"{size} processes with HPU graphs, without lazy collectives."
        return Check("collectives", "problem", text, "PT_HPU_ENABLE_LAZY_COLLECTIVES=true")
    return Check("collectives", "ok", f"{size} processes" if several else "one process")


def tensor_cache(env: Env, facts: Facts) -> Check:
    """Explains a setting of Intel's graph wrappers."""
    if "PT_HPUGRAPH_DISABLE_TENSOR_CACHE" not in env:
        return Check("tensor cache", "ok", "not set")
    text = "PT_HPUGRAPH_DISABLE_TENSOR_CACHE acts on wrap_in_hpu_graph, which is not used here."
    return Check("tensor cache", "note", text)


def metrics_file(env: Env, facts: Facts) -> Check:
    """Checks where the bridge writes its metrics, and when."""
    name, bad = "metrics file", "problem" if facts.hpu else "note"
    path, form = env.get("PT_HPU_METRICS_FILE"), env.get("PT_HPU_METRICS_FILE_FORMAT", "json")
    triggers = env.get("PT_HPU_METRICS_DUMP_TRIGGERS", "process_exit").split(",")
    known = {"process_exit", "mark_step", "metric_change", "user"}
    if not path:
        return Check(name, "ok", "not set")
    if form not in ("json", "text") or not known.issuperset(triggers):
        remedy = "PT_HPU_METRICS_FILE_FORMAT=json PT_HPU_METRICS_DUMP_TRIGGERS=process_exit"
        return Check(name, bad, f"Unknown format or trigger: {form}, {','.join(triggers)}.", remedy)
    if not os.path.dirname(path):
        text = f"{path} names no directory, and the bridge tries to make one."
        return Check(name, bad, text, f"PT_HPU_METRICS_FILE=./{path}")
    if not facts.writable(os.path.dirname(path)):
        return Check(name, bad, f"{path} cannot be written.", "name another file.")
    return Check(name, "ok", path)


def int64(env: Env, facts: Facts) -> Check:
    """Checks `PT_ENABLE_INT64_SUPPORT` against the mode."""
    value = env.get("PT_ENABLE_INT64_SUPPORT")
    if not facts.hpu or value is None:
        return Check("int64", "ok", "not set")
    if facts.lazy(env) and value.lower() in TRUE:
        text = "PT_ENABLE_INT64_SUPPORT is set, which Intel supports in eager mode only."
        return Check("int64", "problem", text, "unset it, or set PT_HPU_LAZY_MODE=0.")
    return Check("int64", "ok", f"PT_ENABLE_INT64_SUPPORT={value}")


def files(env: Env, facts: Facts) -> list[Check]:
    """Checks settings that are not about the card: quantization, caches, the hub."""
    found = [Check("quantization", "ok", "not set")]
    if env.get("QUANT_CONFIG"):
        text = f"QUANT_CONFIG={env['QUANT_CONFIG']} converts the target, not the draft."
        found = [Check("quantization", "note", text, "--draft_quant_config is the draft's.")]
    path = env.get("GAUDI_SPEC_CACHE") or "~/.cache/gaudi_spec"
    if facts.writable(path):
        found.append(Check("model cache", "ok", path))
    else:
        status = "problem" if env.get("GAUDI_SPEC_CACHE") else "note"
        remedy = "GAUDI_SPEC_CACHE=DIRECTORY"
        found.append(Check("model cache", status, f"{path} is not writable.", remedy))
    if env.get("HF_HUB_OFFLINE", "").lower() in TRUE:
        text = "HF_HUB_OFFLINE is set: hub names load only if they were downloaded before."
        return [*found, Check("hub", "note", text)]
    return [*found, Check("hub", "ok", "online names allowed")]
