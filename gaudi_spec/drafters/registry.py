"""Drafters by name: the built-in ones, and those that installed packages register."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from ..errors import ConfigError
from .base import Drafter
from .model import ModelDrafter
from .ngram import CombinedDrafter, NgramDrafter

GROUP = "gaudi_spec.drafters"
BUILT_IN: dict[str, type[Drafter]] = {
    "model": ModelDrafter,
    "ngram": NgramDrafter,
    "combined": CombinedDrafter,
}


def pick(name: str, has_draft: bool) -> type[Drafter] | None:
    """Returns the drafter that `SpecConfig.drafter` names; None decodes plainly.

    Args:
        name: "auto" is "model" with a draft model and None without; "model", "ngram", "combined";
            else the name of an entry point of the group `gaudi_spec.drafters`.
        has_draft: Whether a draft model is given.

    Raises:
        ConfigError: There is no such drafter, it cannot be loaded, or it needs a draft model and
            there is none, or the other way round.
    """
    if name == "auto":
        return ModelDrafter if has_draft else None
    drafter = BUILT_IN.get(name) or _load(name)
    needs = getattr(drafter, "needs_draft", None)
    if not callable(drafter) or not isinstance(needs, bool):
        raise ConfigError(
            f"The entry point {name!r} of {GROUP} is not a drafter: it must be a class with the "
            "attribute needs_draft; see docs/drafters.md."
        )
    if needs and not has_draft:
        raise ConfigError(f"The drafter {name!r} needs a draft model: give an assistant_model.")
    if has_draft and not needs:
        raise ConfigError(
            f"The drafter {name!r} uses no draft model: leave assistant_model out, or choose "
            "another drafter, such as 'combined'."
        )
    return drafter


def _load(name: str) -> type[Drafter]:
    every = entry_points(group=GROUP)
    points: list[EntryPoint] = [point for point in every if point.name == name]
    if not points:
        known = ", ".join(sorted({"auto", *BUILT_IN, *(point.name for point in every)}))
        raise ConfigError(f"There is no drafter {name!r}; installed are: {known}.")
    if len(points) > 1:
        values = " and ".join(point.value for point in points)
        raise ConfigError(
            f"Two packages register a drafter {name!r} ({values}): uninstall one of them."
        )
    try:
        return points[0].load()
    except Exception as error:  # whatever a plug-in's import raises
        raise ConfigError(
            f"The drafter {name!r} ({points[0].value}) cannot be loaded: {error}"
        ) from error
