"""What a call says about its drafts: K, the schedule, prompt lookup."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from .config import MAX_ASSISTANT_TOKENS, SpecConfig
from .errors import ConfigError

# What Transformers' defaults say, in one version or another: nothing that the caller asked for.
_UNSET: dict[str, tuple[Any, ...]] = {
    "num_assistant_tokens": (None, 20),
    "num_assistant_tokens_schedule": (None, "constant"),
    "assistant_confidence_threshold": (None, 0, 0.4),
}


@dataclass(frozen=True)
class Drafting:
    """Settings of drafts by a call, with Transformers' names; None leaves one as it is.

    Attributes:
        num_assistant_tokens: K of every cycle, or with a schedule that varies it the largest.
        num_assistant_tokens_schedule: See `SpecConfig.schedule`.
        assistant_confidence_threshold: See `SpecConfig`.
        prompt_lookup_num_tokens: Look up so many tokens at most.
        max_matching_ngram_size: See `SpecConfig`.
        suggested: K in the draft's own generation config. It was the best where it was found, so
            `auto` may go beyond.
    """

    num_assistant_tokens: int | None = None
    num_assistant_tokens_schedule: str | None = None
    assistant_confidence_threshold: float | None = None
    prompt_lookup_num_tokens: int | None = None
    max_matching_ngram_size: int | None = None
    suggested: int | None = None

    @classmethod
    def read(cls, config: GenerationConfig, given: Mapping[str, Any], draft: Any) -> Drafting:
        """Reads what a call asks for.

        Args:
            config: The call's own generation config, merged with the target's.
            given: The call's keyword arguments, which mean what they say.
            draft: The draft or None. Its threshold is not read: Transformers changes it at will.
        """
        theirs = getattr(draft, "generation_config", None)

        def asked(source: Any, name: str) -> Any:
            value = getattr(source, name, None)
            return None if value in _UNSET[name] else value

        values = {
            name: asked(config, name) if given.get(name) is None else given[name] for name in _UNSET
        }
        if values["num_assistant_tokens_schedule"] is None:
            schedule = asked(theirs, "num_assistant_tokens_schedule")
            values["num_assistant_tokens_schedule"] = schedule
        return cls(
            **values,
            prompt_lookup_num_tokens=config.prompt_lookup_num_tokens,
            max_matching_ngram_size=config.max_matching_ngram_size,
            suggested=asked(theirs, "num_assistant_tokens"),
        )

    def apply(self, config: SpecConfig, has_draft: bool) -> SpecConfig:
        """Returns `config` with these settings.

        Prompt lookup beside a draft model is the drafter "combined", where Transformers would
        leave the model unused.

        Raises:
            ConfigError: A value is out of range, or two of them contradict each other.
        """
        given = {
            "schedule": self.num_assistant_tokens_schedule,
            "assistant_confidence_threshold": self.assistant_confidence_threshold,
            "max_matching_ngram_size": self.max_matching_ngram_size,
            "num_assistant_tokens": self.num_assistant_tokens,
        }
        config = config.replace(**{name: v for name, v in given.items() if v is not None})
        k, policy = self.suggested, config.policy
        if self.prompt_lookup_num_tokens is not None:
            k = self.prompt_lookup_num_tokens
            config = self._looking_up(config, has_draft)
        elif k is None or config.num_assistant_tokens is not None:
            return config
        elif policy == "auto":
            k = max(k, config.most_drafts)
        return config.replace(num_assistant_tokens=k, schedule=policy)

    def _looking_up(self, config: SpecConfig, has_draft: bool) -> SpecConfig:
        k, lookup = self.num_assistant_tokens, self.prompt_lookup_num_tokens
        if type(lookup) is not int or not 1 <= lookup <= MAX_ASSISTANT_TOKENS:
            raise ConfigError(
                "prompt_lookup_num_tokens must be a whole number from 1 to "
                f"{MAX_ASSISTANT_TOKENS}, not {lookup!r}."
            )
        if k not in (None, lookup):
            raise ConfigError(
                f"num_assistant_tokens={k} and prompt_lookup_num_tokens={lookup} contradict each "
                "other, since all drafts of a cycle have one length: give one of them."
            )
        drafter = "combined" if has_draft else "ngram"
        if config.drafter not in ("auto", drafter):
            raise ConfigError(
                f"prompt_lookup_num_tokens asks for the drafter {drafter!r}, the settings for "
                f"{config.drafter!r}: give one of them."
            )
        return config.replace(drafter=drafter)
