"""The rules of a call on the device: which steps are active is structure, their values are data.

Steps run in Transformers' order. A graph belongs to one structure; another temperature, seed or bad
word is another content of the same buffers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from . import noise, processors, warpers
from .options import Sampling
from .processors import Text


class Structure(NamedTuple):
    """What a graph depends on.

    Attributes:
        verifier: "greedy", "rejection" or "coupled".
        steps: Name, constants and shapes of the values of every step.
    """

    verifier: str
    steps: tuple[tuple[str, tuple[int, ...], tuple[tuple[int, ...], ...]], ...]


class Step(NamedTuple):
    """One step with its values."""

    name: str
    constants: tuple[int, ...] = ()
    values: tuple[torch.Tensor, ...] = ()


_MIN_LENGTH = Step("min_length")
GREEDY = Structure("greedy", ((_MIN_LENGTH.name, (), ()),))
# Steps that need no text, and those that read more of it than the places of the block.
_WARPERS = frozenset(
    """temperature top_h top_k top_p min_p typical_p epsilon_cutoff eta_cutoff
    renormalize""".split()
)
_HISTORY = frozenset(
    """sequence_bias bad_words encoder_repetition_penalty repetition_penalty new_token_penalties
    no_repeat_ngram encoder_no_repeat_ngram""".split()
)
_NAMED = {
    "bad_words": processors.sequence_bias,
    "encoder_no_repeat_ngram": lambda *given: processors.no_repeat_ngram(*given, of_prompt=True),
}
# Graphs serve every top_k up to a power of two of at least this.
_TOP_K = 64


def steps(s: Sampling, vocab_size: int, eos_token_ids: list[int]) -> Iterator[Step]:
    """Yields the active steps in Transformers' order."""
    if s.sequence_bias:
        yield _sequences("sequence_bias", s.biases(vocab_size))
    if s.encoder_repetition_penalty != 1:
        yield Step("encoder_repetition_penalty", (), (_number(1 / s.encoder_repetition_penalty),))
    if s.repetition_penalty != 1:
        yield Step("repetition_penalty", (), (_number(s.repetition_penalty),))
    if s.frequency_penalty or s.presence_penalty:
        values = (_number(s.frequency_penalty), _number(s.presence_penalty))
        yield Step("new_token_penalties", (), values)
    if s.no_repeat_ngram_size:
        yield Step("no_repeat_ngram", (s.no_repeat_ngram_size,))
    if s.encoder_no_repeat_ngram_size:
        yield Step("encoder_no_repeat_ngram", (s.encoder_no_repeat_ngram_size,))
    if words := s.bad_words(vocab_size, eos_token_ids):
        yield _sequences("bad_words", dict.fromkeys(words, -math.inf))
    yield _MIN_LENGTH
    if s.forced_bos_token_id is not None:
        yield Step("forced_bos", (), (_mask(s, "forced_bos_token_id", vocab_size),))
    if s.forced_eos_token_id is not None:
        yield Step("forced_eos", (), (_mask(s, "forced_eos_token_id", vocab_size),))
    if s.remove_invalid_values:
        yield Step("remove_invalid")
    if s.exponential_decay_length_penalty is not None:
        start, factor = s.exponential_decay_length_penalty
        yield Step("length_decay", (), (_number(start), _number(math.log(factor))))
    if s.suppress_tokens is not None and len(s.suppress_tokens):
        yield Step("suppress", (), (_mask(s, "suppress_tokens", vocab_size),))
    if s.begin_suppress_tokens is not None and len(s.begin_suppress_tokens):
        late = torch.tensor([int(s.forced_bos_token_id is not None)])
        yield Step("begin_suppress", (), (_mask(s, "begin_suppress_tokens", vocab_size), late))
    if s.do_sample:
        yield from _warpers(s, vocab_size)


def _warpers(s: Sampling, vocab_size: int) -> Iterator[Step]:
    if s.temperature != 1:
        yield Step("temperature", (), (_number(s.temperature),))
    if s.top_h is not None:
        yield Step("top_h", (), (_number(s.top_h),))
    if s.top_k:
        most = min(max(_TOP_K, _power_of_two(s.top_k)), vocab_size)
        yield Step("top_k", (most,), (torch.tensor([min(s.top_k, vocab_size)]),))
    if s.top_p < 1:
        yield Step("top_p", (), (_number(1 - s.top_p),))
    if s.min_p is not None:
        yield Step("min_p", (), (_number(s.min_p),))
    if 0 < s.typical_p < 1:
        yield Step("typical_p", (), (_number(s.typical_p),))
    if s.epsilon_cutoff:
        yield Step("epsilon_cutoff", (), (_number(s.epsilon_cutoff),))
    if s.eta_cutoff:
        yield Step("eta_cutoff", (), (_number(s.eta_cutoff),))
    if s.renormalize_logits:
        yield Step("renormalize")


class Plan(NamedTuple):
    """A call's rules before they are on the device.

    Attributes:
        structure: What a graph depends on.
        values: The values of all steps, in order.
        seed: See `Sampling.seed`; None where nothing is drawn.
    """

    structure: Structure
    values: tuple[torch.Tensor, ...]
    seed: Any

    @classmethod
    def of(
        cls, sampling: Sampling, verifier: str, vocab_size: int, eos_token_ids: list[int]
    ) -> Plan:
        """Plans the rules of a call; the seed that it does not give is drawn here."""
        active = list(steps(sampling, vocab_size, eos_token_ids))
        shapes = tuple(
            (step.name, step.constants, tuple(tuple(v.shape) for v in step.values))
            for step in active
        )
        values = tuple(value for step in active for value in step.values)
        if not sampling.do_sample:
            return cls(Structure("greedy", shapes), values, None)
        seed = noise.default_seed() if sampling.seed is None else sampling.seed
        return cls(Structure(verifier, shapes), values, seed)


class Rules:
    """The buffers of one structure, and what is done with them.

    Args:
        plan: Has the structure; its values are loaded too.
        batch: B.
        device: Where the buffers live.

    Attributes:
        structure: See `Structure`.
        keys: `[B, 2]` int32, what the noise of each row depends on.
    """

    def __init__(self, plan: Plan, batch: int, device: torch.device) -> None:
        self.structure = plan.structure
        self.keys = torch.zeros(batch, 2, dtype=torch.int32, device=device)
        self._values = [torch.zeros_like(value, device=device) for value in plan.values]
        self.reads_history = any(name in _HISTORY for name, *_ in plan.structure.steps)

    def load(self, plan: Plan, rows: int) -> None:
        """Writes a call's values into the buffers, which keep their storage."""
        for buffer, value in zip(self._values, plan.values):
            buffer.copy_(value)
        if plan.seed is not None:
            self.keys[:rows].copy_(torch.tensor(noise.row_keys(plan.seed, rows)).int())

    def on_host(self) -> Rules:
        """Returns a copy on the CPU."""
        other = copy.copy(self)
        other.keys, other._values = self.keys.cpu(), [value.cpu() for value in self._values]
        return other

    def part(self, number: int) -> range:
        """Returns the places of steps before a prefix constraint, before processors, after."""
        names = [name for name, *_ in self.structure.steps]
        first = names.index(_MIN_LENGTH.name) + 1
        last = sum(name not in _WARPERS for name in names)
        return (range(first), range(first, last), range(last, len(names)))[number]

    def process(
        self, logits: torch.Tensor, text: Text, places: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Returns processed logits `[B, T, V]`, in float32 at least where a step computes.

        Args:
            logits: `[B, T, V]`.
            text: What the steps read.
            places: Which steps to do; None: all.
        """
        if self.structure != GREEDY:
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        values = iter(self._values)
        for place, (name, constants, shapes) in enumerate(self.structure.steps):
            own = [next(values) for _ in shapes]
            if places is not None and place not in places:
                continue
            if name in _WARPERS:
                logits = getattr(warpers, name)(logits, *constants, *own)
            else:
                step: Callable = _NAMED.get(name) or getattr(processors, name)
                logits = step(logits, text, *constants, *own)
        return logits

    def draw(self, p: torch.Tensor, index: torch.Tensor, stream: int) -> torch.Tensor:
        """Draws a token for each place.

        Args:
            p: `[B, T, V]` float32, probabilities or multiples of them.
            index: `[B, T]` int64.
            stream: See `noise`.

        Returns:
            `[B, T]` int64.
        """
        clocks = noise.exponential(self.keys, index, stream, p.shape[-1])
        return (p.log() - clocks.log()).argmax(-1)

    def propose(
        self, logits: torch.Tensor, text: Text
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Chooses a draft's token from its logits `[B, 1, V]`.

        Returns:
            Token ids `[B, 1]`; where they are to be tested by rejection the distribution
            `[B, 1, V]` they were drawn from; and the processed logits `[B, 1, V]`.
        """
        logits = self.process(logits, text)
        if self.structure.verifier == "greedy":
            return logits.argmax(-1), None, logits
        # A draft with unsound logits draws from the uniform distribution, which is one at least.
        sound = torch.isfinite(logits.amax(-1, keepdim=True))
        q = torch.where(sound, logits, 0.0).softmax(-1)
        if self.structure.verifier == "coupled":
            return self.draw(q, text.index, noise.TARGET), None, logits
        return self.draw(q, text.index, noise.DRAFT), q, logits


def _number(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float32)


def _mask(s: Sampling, name: str, vocab_size: int) -> torch.Tensor:
    mask = torch.zeros(vocab_size, dtype=torch.int32)
    mask[s.marked(name, vocab_size)] = 1
    return mask


def _sequences(name: str, biases: dict[tuple[int, ...], float]) -> Step:
    """Returns sequences as tensors whose sizes are powers of two, so that few shapes exist."""
    count = _power_of_two(len(biases))
    longest = max(map(len, biases)) - 1
    width = _power_of_two(longest) if longest else 0
    prefix = torch.full((count, width), -1)
    size, last = torch.zeros(count, dtype=torch.long), torch.zeros(count, dtype=torch.long)
    bias = torch.zeros(count)  # what is left over adds nothing
    for row, (ids, value) in enumerate(biases.items()):
        prefix[row, width - len(ids) + 1 :] = torch.tensor(ids[:-1], dtype=torch.long)
        size[row], last[row], bias[row] = len(ids) - 1, ids[-1], value
    return Step(name, (), (prefix, size, last, bias))


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
