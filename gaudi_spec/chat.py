"""A chat in the terminal: drafted tokens in colour, and between turns only new tokens are fed."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from .config import SpecConfig
from .device import DEVICES, Device, get_device
from .engine import SpeculativeEngine
from .errors import ConfigError, InputError
from .helptext import HelpFormatter
from .loading import Pair, Source, load_pair
from .options import resolve_options
from .stopping import Steps
from .streaming import TextDecoder

DRAFTED, PLAIN = "\x1b[32m", "\x1b[0m"
HELP = "/reset forgets the chat, /exit leaves, Ctrl-C stops an answer"


def parser() -> argparse.ArgumentParser:
    """Returns the argument parser."""
    p = argparse.ArgumentParser(
        prog="chat.py",
        description=f"{__doc__.strip()} {HELP}.",
        formatter_class=HelpFormatter,
    )
    p.add_argument("--model_name_or_path", required=True, help="target: directory or hub name")
    p.add_argument("--assistant_model", help="draft; without it decoding is plain")
    p.add_argument("--num_assistant_tokens", type=int, help="K (default: chosen, up to 5)")
    p.add_argument("--system", help="system message")
    p.add_argument("--max_new_tokens", type=int, default=512, help="of each answer")
    p.add_argument("--max_length", type=int, default=2048, help="tokens of the whole chat")
    p.add_argument("--device", default="auto", choices=("auto", *DEVICES), help="where to run")
    p.add_argument("--bf16", action="store_true", help="load both in bfloat16, not float32")
    p.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")
    return p


class Chat:
    """A conversation.

    Args:
        pair: Models and tokenizer, which must have a chat template.
        config: Settings, `max_length` among them.
        device: Where the models are.
        k: Draft tokens of every cycle; None lets `config` say.
        system: System message or None.
        max_new_tokens: Budget of an answer.
    """

    def __init__(
        self,
        pair: Pair,
        config: SpecConfig,
        device: Device,
        k: int | None = None,
        system: str | None = None,
        max_new_tokens: int = 512,
    ) -> None:
        if not pair.tokenizer.chat_template:
            raise ConfigError("The target's tokenizer has no chat template: choose a chat model.")
        wanted: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False}
        if k is not None:
            wanted["num_assistant_tokens"] = k
        options = resolve_options(
            pair.target, pair.draft, 0, None, wanted, tokenizer=pair.tokenizer
        )
        config = options.drafting.apply(config, pair.draft is not None)
        self.pair, self.max_new_tokens = pair, max_new_tokens
        self.engine = SpeculativeEngine(pair.target, pair.draft, config, device)
        self._first = [{"role": "system", "content": system}] if system else []
        self._ends, self._criteria = options.eos_token_ids, options.criteria
        self.reset()
        if config.captures(device.captures):
            self.engine.warm_up(1, config.max_length)

    def reset(self) -> None:
        """Forgets what was said."""
        self.messages = list(self._first)

    def answer(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yields an answer in pieces, and whether each was drafted; one that is dropped is kept.

        Raises:
            InputError: The chat is full.
        """
        said = [*self.messages, {"role": "user", "content": text}]
        tokenizer = self.pair.tokenizer
        prompt = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        budget = min(self.max_new_tokens, self.engine.config.max_length - len(ids))
        if budget < 1:
            raise InputError("The chat is full: /reset it, or start with a larger --max_length.")
        decoder, pieces = TextDecoder(tokenizer, skip_special_tokens=True), []
        step = Steps(torch.tensor([ids]), 0, self._criteria) if self._criteria else None
        options = {"eos_token_ids": self._ends, "step": step, "reuse": True}
        try:
            for event in self.engine.stream([ids], budget, **options):
                piece = decoder.add(event.token)
                if event.finish_reason is not None:
                    piece += decoder.flush()
                if piece:
                    pieces.append(piece)
                    yield piece, event.from_draft
        finally:
            self.messages = [*said, {"role": "assistant", "content": "".join(pieces)}]


def main(argv: list[str]) -> int:
    """Runs the chat until /exit or the end of the input."""
    args = parser().parse_args(argv)
    chat = _open(args)
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    asked = "> " if sys.stdin.isatty() else ""
    print(HELP, file=sys.stderr)
    while True:
        try:
            text = input(asked).strip()
        except EOFError:
            return 0
        except KeyboardInterrupt:
            print(f"\n{HELP}", file=sys.stderr)
            continue
        if text == "/exit":
            return 0
        if text == "/reset":
            chat.reset()
        elif text.startswith("/"):
            print(HELP, file=sys.stderr)
        elif text:
            _show(chat, text, colour)


def _open(args: argparse.Namespace) -> Chat:
    for name in ("max_new_tokens", "max_length"):
        if getattr(args, name) < 2:
            raise ConfigError(f"--{name} must be at least 2, not {getattr(args, name)}.")
    disable_progress_bar()
    device = get_device(args.device)
    target = Source(args.model_name_or_path)
    draft = Source(args.assistant_model) if args.assistant_model else None
    pair = load_pair(target, draft, torch.bfloat16 if args.bf16 else torch.float32, device)
    room = getattr(pair.target.config, "max_position_embeddings", None) or args.max_length
    config = SpecConfig(max_length=min(args.max_length, room), batch_size=1)
    if args.num_assistant_tokens is not None and draft is None:
        print("--num_assistant_tokens has no effect without --assistant_model.", file=sys.stderr)
    k = args.num_assistant_tokens
    return Chat(pair, config, device, k, args.system, args.max_new_tokens)


def _show(chat: Chat, text: str, colour: bool) -> None:
    """Prints an answer while it comes, and its figures on standard error."""
    begin, stopped = time.perf_counter(), ""
    pieces = chat.answer(text)
    try:
        for piece, drafted in pieces:
            shown = f"{DRAFTED}{piece}{PLAIN}" if colour and drafted else piece
            print(shown, end="", flush=True)
    except KeyboardInterrupt:
        pieces.close()
        stopped = "stopped, "
    except InputError as error:
        print(error, file=sys.stderr)
        return
    print()
    report, seconds = chat.engine.report, time.perf_counter() - begin
    rate = report.acceptance_rate
    accepted = "nothing drafted" if rate is None else f"{rate:.0%} of drafts accepted"
    print(
        f"[{stopped}{report.emitted_tokens} tokens, {report.emitted_tokens / seconds:.1f} "
        f"tokens/s, {accepted}, {report.reused_tokens} prompt tokens reused]",
        file=sys.stderr,
    )
