"""`gaudi-spec distill`: trains a small draft for a target, from the target's own text."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from ..config import SpecConfig
from ..device import DEVICES, Device, get_device
from ..engine import SpeculativeEngine
from ..errors import ConfigError, InputError
from ..helptext import HelpFormatter
from ..loading import Pair, Source, load_pair
from ..models.support import vocabulary
from ..request import token_ids
from ..results import progress, write_json
from . import checkpoint, prompts
from .checks import check_fits, check_values
from .corpus import Corpus, Recipe, load
from .heldout import HeldOut, agreement, best_k
from .student import Shape, build, expected_counts, kept_ids
from .teacher import Sample, Teacher
from .train import Progress, Settings, Trainer, join

TEXT_SHARE = 0.45  # of the time, at most, goes into text where --tokens does not say how much


def parser() -> argparse.ArgumentParser:
    """Returns the argument parser."""
    p = argparse.ArgumentParser(
        prog="gaudi-spec distill",
        description="Train a small draft for a target on text that the target writes itself. An "
        "interrupted run goes on where it stopped when it is started again.",
        formatter_class=HelpFormatter,
    )
    p.add_argument("--model", required=True, help="target: directory or hub name")
    p.add_argument("--output", required=True, help="directory for the draft")
    size = p.add_argument_group("the draft (several sizes: the best after a trial is trained)")
    size.add_argument("--layers", type=int, nargs="+", default=[2], help="decoder layers")
    size.add_argument("--hidden", type=int, nargs="+", help="width (default: the target's)")
    size.add_argument(
        "--vocab_subset",
        type=int,
        nargs="+",
        help="keep only so many ids, the most frequent ones (default: all)",
    )
    size.add_argument("--trial_steps", type=int, default=100, help="steps of each size's trial")
    text = p.add_argument_group("text")
    text.add_argument("--prompts", help="prompts, one a line or a YAML list (default: built-in)")
    text.add_argument("--texts", help="texts to learn besides, in the same form")
    text.add_argument("--tokens", type=int, help="tokens of text to make (default: by time)")
    text.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.0, 0.7], help="of the target's text"
    )
    text.add_argument("--batch_size", type=int, default=96, help="texts made at a time")
    text.add_argument("--max_input_tokens", type=int, default=128, help="longest prompt")
    text.add_argument("--max_new_tokens", type=int, default=128, help="tokens made for a prompt")
    run = p.add_argument_group("run")
    run.add_argument("--minutes", type=float, default=60.0, help="time for everything")
    run.add_argument("--steps", type=int, help="training steps (default: by time)")
    run.add_argument("--train_batch_size", type=int, default=16, help="texts of a training step")
    run.add_argument("--learning_rate", type=float, default=1e-3, help="peak learning rate")
    run.add_argument("--seed", type=int, default=0, help="of everything drawn")
    run.add_argument("--device", default="auto", choices=("auto", *DEVICES), help="where to run")
    run.add_argument("--torch_compile", action="store_true", help="measure step times in graphs")
    run.add_argument("--trust_remote_code", action="store_true")
    run.add_argument("--keep_work", action="store_true", help="keep OUTPUT/work when done")
    run.add_argument("-q", "--quiet", action="store_true", help="no progress on standard error")
    run.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")
    return p


def main(argv: list[str]) -> int:
    """Runs the command; the last line of standard output is a JSON object."""
    args = parser().parse_args(argv)
    check_values(args)
    values = Distillation(args).run()
    print(json.dumps(values))
    return 0


class Distillation:
    """One run, as parsed by `parser`."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device: Device = get_device(args.device)
        source = Source(args.model, trust_remote_code=args.trust_remote_code)
        disable_progress_bar()  # Transformers' own
        self.pair: Pair = load_pair(source, None, torch.float32, self.device)
        self.asked = prompts.read(args.prompts) if args.prompts else None
        self.texts = prompts.read(args.texts) if args.texts else None
        check_fits(self.pair.target, args)
        self.work = Path(args.output) / "work"
        self.work.mkdir(exist_ok=True)
        self._same_run()
        clock = self.work / "minutes.json"
        spent = json.loads(clock.read_text("utf-8")) if clock.exists() else 0.0
        self.begin = time.monotonic() - 60 * spent  # what earlier runs took counts too
        self.deadline = self.begin + 60 * args.minutes
        self.ends = token_ids(self.pair.target.generation_config.eos_token_id)

    @property
    def minutes(self) -> float:
        """Minutes spent, in earlier runs too."""
        return round((time.monotonic() - self.begin) / 60, 1)

    def run(self) -> dict[str, Any]:
        """Makes text, trains, writes the draft; returns what is known about it."""
        try:
            return self._run()
        finally:
            if self.work.exists():
                write_json(self.work / "minutes.json", self.minutes)

    def _run(self) -> dict[str, Any]:
        held_out = self._held_out()
        corpus = self._corpus()
        trainer, shape, costs = self._choose(corpus, held_out)
        done = self._train(trainer, self.args.steps, self.deadline, "train")
        matches = held_out.matches(trainer.student)
        values = {
            "target": self.args.model,
            "layers": shape.layers,
            "hidden": shape.hidden,
            "vocab_subset": shape.kept,
            "parameters": sum(p.numel() for p in trainer.student.parameters()),
            "text_tokens": int(corpus.count.sum()),
            "steps": done.step,
            "planned_steps": done.total,
            "minutes": self.minutes,
            "seed": self.args.seed,
            "agreement": agreement(matches),
            "agreement_by_kind": held_out.by_kind(matches),
            **costs,
            **dict(zip(("best_k", "expected_speedup"), best_k(matches, **costs))),
            "history": done.history,
        }
        checkpoint.write(trainer.student, self.pair.tokenizer, Path(self.args.output), values)
        write_json(Path(self.args.output) / "distill.json", values)
        if not self.args.keep_work and done.step >= done.total:
            shutil.rmtree(self.work)
        return values

    def _same_run(self) -> None:
        """Refuses to go on with other settings than a run was begun with."""
        free = ("minutes", "quiet", "verbose", "keep_work", "device", "output", "torch_compile")
        mine = {name: value for name, value in vars(self.args).items() if name not in free}
        path = self.work / "settings.json"
        if not path.exists():
            write_json(path, mine)
        theirs = json.loads(path.read_text(encoding="utf-8"))
        changed = sorted(name for name in mine if mine[name] != theirs.get(name))
        if changed:
            raise ConfigError(
                f"{self.work} holds a run begun with another {', '.join(changed)}: use the same "
                "settings to go on with it, another --output, or delete that directory."
            )

    def _held_out(self) -> HeldOut:
        path = self.work / "held_out.pt"
        kinds = prompts.held_out()
        if self.asked:
            count = min(max(len(self.asked) // 10, 1), 40)
            kinds, self.asked = {"prompts": self.asked[-count:]}, self.asked[:-count]
        names = [kind for kind, texts in kinds.items() for _ in texts]
        rows = [prompts.as_chat(self.pair.tokenizer, t) for texts in kinds.values() for t in texts]
        if path.exists():
            texts = torch.load(path, weights_only=True)
        else:
            engine = SpeculativeEngine(self.pair.target, None, SpecConfig(), self.device)
            self._say(f"held-out text: {len(rows)} prompts")
            texts = engine.generate(rows, self.args.max_new_tokens, eos_token_ids=self.ends)
            torch.save(texts, path)
        return HeldOut.of(rows, texts, names)

    def _corpus(self) -> Sample:
        args = self.args
        teacher = Teacher(
            self.pair.target,
            self.device,
            args.batch_size,
            args.max_input_tokens,
            args.max_new_tokens,
        )
        recipe = Recipe(args.seed, tuple(args.temperatures), self._fitting(), self.texts)
        corpus = Corpus(self.work / "corpus", teacher, self.pair.tokenizer, self.ends, recipe)
        deadline = self.deadline if args.tokens else self.begin + 60 * args.minutes * TEXT_SHARE
        with progress(args.quiet, desc="text", total=args.tokens, unit="tok") as bar:
            shards = corpus.collect(args.tokens or sys.maxsize, deadline, bar.update)
        return join([load(path) for path in shards])

    def _fitting(self) -> list[str] | None:
        if self.asked is None:
            return None
        most = self.args.max_input_tokens
        fitting = [t for t in self.asked if len(prompts.as_chat(self.pair.tokenizer, t)) <= most]
        if not fitting:
            raise InputError(
                f"No prompt of {self.args.prompts} is left to train on: give at least two of at "
                f"most --max_input_tokens={most} tokens, chat template included."
            )
        return fitting

    def _choose(self, corpus: Sample, held_out: HeldOut) -> tuple[Trainer, Shape, dict[str, float]]:
        """Returns the trainer of the size with the best expected speed-up after a trial."""
        args = self.args
        shapes = [
            Shape(layers, hidden, kept)
            for layers in args.layers
            for hidden in args.hidden or [self.pair.target.config.hidden_size]
            for kept in args.vocab_subset or [None]
        ]
        best = None
        for shape in shapes:
            trainer = self._trainer(shape, corpus, held_out)
            costs = self._costs(trainer, shape)
            if len(shapes) == 1:
                return trainer, shape, costs
            trial = self._trainer(shape, corpus, held_out, "trial ")
            self._train(trial, args.trial_steps, self.deadline, f"trial of {shape}")
            k, gain = best_k(held_out.matches(trial.student), **costs)
            self._say(f"{shape}: agreement {trial.progress.best:.3f}, {gain:.2f}x at K = {k}")
            if best is None or gain > best[0]:
                best = gain, trainer, shape, costs
        return best[1:]

    def _trainer(self, shape: Shape, corpus: Sample, held_out: HeldOut, prefix="") -> Trainer:
        args = self.args
        kept = None
        if shape.kept is not None:
            counts = expected_counts(corpus, vocabulary(self.pair.target)[0])
            always = {*self.ends, *self.pair.tokenizer.all_special_ids}
            kept = kept_ids(counts, sorted(always), shape.kept)
        student = build(self.pair.target, shape, kept, args.seed)
        settings = Settings(args.seed, args.train_batch_size, args.learning_rate)
        place = self.work / f"{prefix}{shape}"
        return Trainer(student, corpus, held_out, place, settings, self.device.torch_device)

    def _train(self, trainer: Trainer, steps: int | None, deadline: float, name: str) -> Progress:
        with progress(self.args.quiet, desc=name, unit="step") as bar:

            def tell(now: Progress) -> None:
                bar.total = now.total
                if now.history:
                    last = now.history[-1]
                    bar.set_postfix_str(f"loss {last['loss']:.3f}, agreed {last['agreement']:.3f}")
                bar.update(now.step - bar.n)

            return trainer.run(steps, deadline, tell)

    def _costs(self, trainer: Trainer, shape: Shape) -> dict[str, float]:
        """Returns the time of a draft step and of a verification, in plain steps of the target."""
        path = self.work / f"costs of {shape}.json"
        if not path.exists():
            compiled = "graph" if self.args.torch_compile else "auto"
            write_json(
                path, checkpoint.costs(self.pair.target, trainer.student, self.device, compiled)
            )
        return json.loads(path.read_text(encoding="utf-8"))

    def _say(self, line: str) -> None:
        if not self.args.quiet:
            print(line, file=sys.stderr, flush=True)
