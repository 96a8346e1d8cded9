"""The chat example: from a pipe, on a terminal, interrupted, and turn after turn."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_checkpoints
import toys

from gaudi_spec import chat, cli
from gaudi_spec.loading import Pair

SCRIPT = Path(__file__).parent.parent / "examples" / "chat.py"
EOS = tiny_checkpoints.EOS_ID


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    target, draft = tiny_checkpoints.make(tmp_path_factory.mktemp("chat"))
    return ["--model_name_or_path", str(target), "--assistant_model", str(draft)]


@pytest.fixture
def talk(names, monkeypatch, capsys):
    """Says lines, with the given arguments, and returns answers and figures."""

    def run(*lines, terminal=False, arguments=()):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
        assert cli.run_command(chat.main, [*names, "--max_new_tokens", "16", *arguments]) == 0
        out, err = capsys.readouterr()
        return out.splitlines(), [line for line in err.splitlines() if line.startswith("[")]

    return run


def expected(*said):
    """Returns the answers of the target itself, each turn from the whole chat."""
    tokenizer, messages, answers = tiny_checkpoints.word_tokenizer(), [], []
    for text in said:
        messages.append({"role": "user", "content": text})
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"][0]
        new = toys.greedy(toys.target(), ids, 16).tolist()
        new = new[: new.index(EOS) + 1] if EOS in new else new
        answers.append(tokenizer.decode(new, skip_special_tokens=True))
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def test_answers_are_the_targets_own_turn_after_turn(talk):
    out, figures = talk("w9 w8", "w40 w41 w42", "", "w7", arguments=["--num_assistant_tokens", "5"])
    assert out == expected("w9 w8", "w40 w41 w42", "w7")
    reused = [int(line.split(" prompt tokens")[0].split()[-1]) for line in figures]
    assert reused[0] == 0 and 0 < reused[1] < reused[2]
    assert all("accepted" in line and "tokens/s" in line for line in figures)


def test_reset_forgets_and_exit_leaves(talk):
    out, _ = talk("w9 w8", "/reset", "w40", "/help", "/exit", "w7")
    assert out == [*expected("w9 w8"), *expected("w40")]


def test_a_full_chat_says_so_and_can_be_reset(talk):
    out, _ = talk("w9 w8", "w40 w41", "/reset", "w40", arguments=["--max_length", "26"])
    assert out[0] == expected("w9 w8")[0] and out[-1] == expected("w40")[0]


@pytest.mark.parametrize("no_color", [None, "1"])
def test_drafted_tokens_are_green_on_a_terminal_only(talk, monkeypatch, no_color):
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", no_color)
    (line,), _ = talk("w9 w8", terminal=True, arguments=["--num_assistant_tokens", "3"])
    assert (chat.DRAFTED in line) == (no_color is None)
    assert line.replace(chat.DRAFTED, "").replace(chat.PLAIN, "") == expected("w9 w8")[0]


def test_an_interrupt_stops_the_answer_only(names):
    """What was said until then stays said, and the next answer is right."""
    args = chat.parser().parse_args([*names, "--max_new_tokens", "16"])
    running = chat._open(args)
    assert isinstance(running.pair, Pair)
    pieces = running.answer("w9 w8")
    begun = next(pieces)[0] + next(pieces)[0]
    pieces.close()
    assert running.messages[-1] == {"role": "assistant", "content": begun}
    model, original = running.engine.runtime.target, running.engine.runtime.target.forward

    def interrupt(*arguments, **options):
        signal.raise_signal(signal.SIGINT)
        return original(*arguments, **options)

    model.forward = interrupt
    chat._show(running, "w5", False)
    assert running.messages[-1]["role"] == "assistant"
    model.forward = original
    running.reset()
    assert "".join(piece for piece, _ in running.answer("w9 w8")) == expected("w9 w8")[0]


def test_the_example_runs_from_a_pipe(names):
    done = subprocess.run(
        [sys.executable, SCRIPT, *names, "--max_new_tokens", "16"],
        input="w9 w8\n",
        capture_output=True,
        text=True,
        cwd=SCRIPT.parent.parent,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == expected("w9 w8")


def test_a_tokenizer_without_a_template_is_refused(tmp_path, capsys):
    tokenizer = tiny_checkpoints.word_tokenizer()
    tokenizer.chat_template = None
    target = tiny_checkpoints.save(tmp_path / "t", toys.target(), tokenizer)
    assert cli.run_command(chat.main, ["--model_name_or_path", str(target)]) == 2
    assert "chat template" in capsys.readouterr().err
