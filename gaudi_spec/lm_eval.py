"""Tasks of lm-evaluation-harness: scored by the target, generated with a draft, static shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tqdm import tqdm
from transformers import StoppingCriteria, StoppingCriteriaList

from . import hf
from .config import SpecConfig
from .device import get_device
from .errors import ConfigError
from .metrics import Report
from .models.support import max_positions
from .scoring import Scorer

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ConfigError(
        "lm-evaluation-harness is not installed: pip install 'gaudi-spec[eval]'."
    ) from error

BUCKETS = (16, 32, 64, 128, 189, 284, 384)


class GaudiSpecLM(TemplateLM):
    """A target with an optional draft, for lm-evaluation-harness.

    Likelihoods are the target's own: a draft does not take part. Texts are generated with the
    draft, and are what the target alone would write.

    Args:
        model: The target, on its device.
        tokenizer: Its tokenizer.
        assistant_model: The draft or None.
        batch_size: Rows of a forward.
        buckets: Widths of scoring; the widest is the longest text scored, of longer ones the end.
        config: Settings of the engine.
        device: Device name or object; None takes the target's.
        max_gen_toks: Budget of tasks that set none.
        add_bos_token: Let the tokenizer add its special tokens to texts that do not have them.

    Attributes:
        reports: Counted facts of every batch that was generated.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        assistant_model: Any = None,
        *,
        batch_size: int = 1,
        buckets: Sequence[int] = BUCKETS,
        config: SpecConfig | None = None,
        device: Any = None,
        max_gen_toks: int = 256,
        add_bos_token: bool = True,
    ) -> None:
        super().__init__()
        self.model, self.tokenizer, self.assistant_model = model, tokenizer, assistant_model
        self.batch_size, self.max_gen_toks = batch_size, max_gen_toks
        self.add_bos_token = add_bos_token
        self.config = (config or SpecConfig()).replace(batch_size=batch_size)
        room = max_positions(model.config)
        widths = [min(width, room or width) for width in buckets]
        self.engine_device = get_device(device or model.device)
        self.scorer = Scorer(model, batch_size, widths, self.config, self.engine_device)
        self.max_length = self.scorer.widths[-1]
        self._room = room or 2048
        self.reports: list[Report] = []

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The id before a text without context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """Name under which prepared requests are kept."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Returns the chat as one text."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Returns the ids of a text; a beginning that it has already is not added."""
        if add_special_tokens is None:
            bos = self.tokenizer.bos_token
            add_special_tokens = self.add_bos_token and not (bos and string.startswith(bos))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        """Returns the log-likelihood of each whole text, in windows of `max_length` tokens."""
        windows, owners = [], []
        for owner, request in enumerate(requests):
            for pair in get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, 1
            ):
                windows.append((None, *make_disjoint_window(pair)))
                owners.append(owner)
        sums = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm)):
            sums[owner] += value
        for request, value in zip(requests, sums):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return sums

    def _loglikelihood_tokens(
        self, requests: list, disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Returns log-likelihood and greediness of each `(key, context ids, continuation ids)`."""
        texts = [(context + new)[-self.max_length - 1 :] for _, context, new in requests]
        answers: list[Any] = [None] * len(requests)
        for batch in self._batches([len(text) for text in texts], "score", disable_tqdm):
            for i, score in zip(batch, self.scorer.score([texts[i] for i in batch])):
                key, _, new = requests[i]
                count = min(len(new), len(score.greedy))
                value = float(score.log_probs[-count:].sum()), bool(score.greedy[-count:].all())
                answers[i] = value
                if key is not None:
                    self.cache_hook.add_partial("loglikelihood", key, value)
        return answers

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        """Returns each context's continuation, up to the first of its stop texts."""
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(i)
        answers = [""] * len(requests)
        for members in groups.values():
            rows = [self.tok_encode(requests[i].args[0]) for i in members]
            for batch in self._batches([len(row) for row in rows], "generate", disable_tqdm):
                options = requests[members[0]].args[1]
                for j, text in zip(batch, self._generate([rows[j] for j in batch], options)):
                    answers[members[j]] = text
                    args = requests[members[j]].args
                    self.cache_hook.add_partial("generate_until", args, text)
        return answers

    def _generate(self, rows: list[list[int]], options: dict[str, Any]) -> list[str]:
        options = dict(options)
        until, budget = options.pop("until", None) or [], options.pop("max_gen_toks", None)
        until, budget = [until] if isinstance(until, str) else until, budget or self.max_gen_toks
        if not options.get("temperature"):
            options.pop("temperature", None)
            options.setdefault("do_sample", False)
        if budget >= self._room:
            raise ConfigError(
                f"max_gen_toks={budget} leaves no room for a prompt: the model has {self._room} "
                "positions, lower it."
            )
        rows = [row[-(self._room - budget) :] for row in rows]
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        stop = _Until(self.tokenizer, [text for text in until if text], width)
        if self.model.generation_config.eos_token_id is None:
            options.setdefault("eos_token_id", self.eot_token_id)
        out = hf.generate(
            self.model,
            ids,
            attention_mask=mask,
            assistant_model=self.assistant_model,
            max_new_tokens=budget,
            stopping_criteria=StoppingCriteriaList([stop]),
            spec_config=self.config,
            device=self.engine_device,
            **options,
        )
        self.reports.append(hf.last_report())
        texts = self.tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)
        return [stop.cut(text) for text in texts]

    def _batches(self, lengths: list[int], name: str, quiet: bool) -> Iterator[list[int]]:
        """Yields indices in batches, the longest first: buffers have their size from the start."""
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        with tqdm(total=len(order), desc=name, **({"disable": True} if quiet else {})) as bar:
            for at in range(0, len(order), self.batch_size):
                yield order[at : at + self.batch_size]
                bar.update(len(order[at : at + self.batch_size]))


class _Until(StoppingCriteria):
    """Ends a row whose new text holds a stop text; unlike stop strings, the prompt has no part."""

    def __init__(self, tokenizer: Any, texts: list[str], width: int) -> None:
        self._tokenizer, self._texts, self._width = tokenizer, texts, width
        # A text may begin and end inside a token.
        lengths = [len(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
        self._tokens = max(lengths, default=0) + 2

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        new = input_ids[:, max(self._width, input_ids.shape[1] - self._tokens) :]
        return torch.tensor([self.cut(text) != text for text in self._tokenizer.batch_decode(new)])

    def cut(self, text: str) -> str:
        """Returns what comes before the first stop text."""
        return text[: min((text.find(stop) for stop in self._texts if stop in text), default=None)]
