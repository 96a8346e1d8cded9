"""Distillation: the teacher's notes, the draft's shape, training, and what validation claims."""

from __future__ import annotations

import functools
import json
import re
import time

import pytest
import tiny_checkpoints
import torch
import toys
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from gaudi_spec import SpecConfig, SpeculativeEngine, cli, loading
from gaudi_spec.device import get_device
from gaudi_spec.distill import heldout, prompts
from gaudi_spec.distill.corpus import Corpus, Recipe, load
from gaudi_spec.distill.student import Shape, build, kept_ids
from gaudi_spec.distill.teacher import Sample, Teacher
from gaudi_spec.distill.train import Progress, Settings, Trainer, join
from gaudi_spec.errors import ConfigError
from gaudi_spec.models.compact import CompactLlamaForCausalLM

CPU = get_device("cpu")
FAR = 1e9  # seconds; "no deadline"


def teacher(batch: int = 5, prompt: int = 9, new: int = 16, candidates: int = 8) -> Teacher:
    return Teacher(toys.target(), CPU, batch, prompt, new, candidates)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_prompts(count: int, seed: int) -> list[list[int]]:
    return torch.randint(3, toys.VOCAB, (count, 3), generator=seeded(seed)).tolist()


@functools.cache
def corpus() -> Sample:
    source = teacher(64, 4, 24, 16)
    temperatures = (0.0, 0.0, 0.7, 1.0) * 6
    shards = [
        source.sample(random_prompts(64, i), temperature, seeded(i), ())
        for i, temperature in enumerate(temperatures)
    ]
    return join(shards)


@functools.cache
def held_out() -> heldout.HeldOut:
    rows = random_prompts(32, 999)
    texts = SpeculativeEngine(toys.target(), None).generate(rows, 24)
    return heldout.HeldOut.of(rows, texts, ["random"] * len(rows))


def trainer(directory, data: Sample | None = None, layers: int = 2) -> Trainer:
    student = build(toys.target(), Shape(layers, 32, None), None, seed=0)
    settings = Settings(batch=64, learning_rate=3e-3, checks=6)
    where = torch.device("cpu")
    return Trainer(student, data or corpus(), held_out(), directory, settings, where)


# --- the teacher ---


def test_greedy_text_is_the_targets_own():
    rows = [prompt.tolist() for prompt in toys.PROMPTS]
    longest = max(map(len, rows))
    sample = teacher(len(rows), longest, 16).sample(rows, 0.0, seeded(0), ())
    for row, n, prompt in zip(sample.tokens, sample.prompt.tolist(), toys.PROMPTS):
        want = toys.greedy(toys.target(), prompt, 16)
        assert row[n : n + 16].tolist() == want.tolist()
        toys.assert_sound(want)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_notes_are_the_targets_distribution(temperature):
    rows = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14], [3, 4], [40, 41]]
    sample = teacher().sample(rows, temperature, seeded(1), ())
    with torch.no_grad():
        for b, prompt in enumerate(rows):
            text = sample.tokens[b, : len(prompt) + 16].long()
            logprobs = toys.target()(input_ids=text[None]).logits[0].log_softmax(-1)
            at = torch.arange(16) + len(prompt) - 1
            want = logprobs[at].gather(1, sample.top_ids[b].long())
            torch.testing.assert_close(sample.top_logprobs[b].float(), want, atol=2e-2, rtol=2e-3)
            assert torch.equal(sample.top_ids[b, :, 0].long(), logprobs[at].argmax(-1))


def test_given_texts_get_the_same_notes():
    source = teacher(4, 9, 20)
    texts = random_prompts(1, 3)[0] * 5, [4, 5], [7, 8, 9], list(range(20, 41))
    sample = source.score(texts)
    assert sample.count.tolist() == [len(text) - 1 for text in texts]
    with torch.no_grad():
        for b, text in enumerate(texts):
            logprobs = toys.target()(input_ids=torch.tensor([text])).logits[0].log_softmax(-1)
            n = len(text) - 1
            want = logprobs[:n].gather(1, sample.top_ids[b, :n].long())
            torch.testing.assert_close(
                sample.top_logprobs[b, :n].float(), want, atol=2e-2, rtol=2e-3
            )


def test_a_text_ends_with_its_end_token():
    rows = [[5, 6, 7]] * 5
    greedy = toys.greedy(toys.target(), torch.tensor(rows[0]), 16).tolist()
    end = greedy[6]
    sample = teacher().sample(rows, 0.0, seeded(0), [end])
    assert sample.count.tolist() == [greedy.index(end) + 1] * 5


# --- the corpus ---


def make_corpus(directory, **recipe) -> Corpus:
    source = Teacher(toys.target(), CPU, 6, 24, 12)
    chosen = {"seed": 3, "temperatures": (0.0, 0.7)} | recipe
    words = tiny_checkpoints.word_tokenizer()
    return Corpus(directory, source, words, [tiny_checkpoints.EOS_ID], Recipe(**chosen))


def test_a_shard_depends_on_seed_and_number_only(tmp_path):
    texts = [tiny_checkpoints.words(*range(9 + i, 20 + i)) for i in range(10)]
    asked = [tiny_checkpoints.words(30 + i, 31 + i) for i in range(8)]
    recipe = {"prompts": asked, "texts": texts}
    counts: list[int] = []
    paths = make_corpus(tmp_path / "whole", **recipe).collect(
        400, FAR + time.monotonic(), counts.append
    )
    assert sum(counts) >= 400 > sum(counts[:-1]) and len(paths) > 6
    again = make_corpus(tmp_path / "again", **recipe)
    again.collect(1, FAR, lambda n: None)
    resumed = make_corpus(tmp_path / "again", **recipe).collect(
        400, FAR + time.monotonic(), lambda n: None
    )
    for one, other in zip(paths, resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(load(one), load(other)))
    assert not torch.equal(load(paths[0]).tokens[:, :8], load(paths[1]).tokens[:, :8])
    assert load(paths[2]).prompt.tolist() == [1] * 6  # the third is of given texts


def test_built_in_prompts_are_filled_and_apart_from_the_held_out():
    source = prompts.endless(0)
    some = [next(source) for _ in range(800)]
    assert not any("{" in text for text in some) and len(set(some)) > 500
    held = {text for texts in prompts.held_out().values() for text in texts}
    assert len(held) >= 40 and not held & set(some)
    assert set(prompts.held_out()) == {
        name.removeprefix("kind ") for name in prompts.built_in() if name.startswith("kind ")
    }


def test_the_target_can_be_asked_for_prompts():
    words = tiny_checkpoints.word_tokenizer()
    start, end = prompts.opening(words)
    assert words.decode(start) == "<s> user :" and words.decode([end]) == "</s>"


# --- the draft's shape ---


def compact(kept: torch.Tensor, vocab: int = toys.VOCAB) -> CompactLlamaForCausalLM:
    return build(toys.target(), Shape(2, 32, len(kept)), kept, seed=0).eval()


def test_a_compact_llama_that_keeps_all_is_a_llama():
    everything = compact(torch.arange(toys.VOCAB))
    plain = build(toys.target(), Shape(2, 32, None), None, seed=0).eval()
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        assert torch.equal(everything(input_ids=ids).logits, plain(input_ids=ids).logits)


def test_ids_left_out_get_probability_zero_and_their_neighbours_row():
    kept = torch.arange(0, toys.VOCAB, 2)
    model = compact(kept)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[4, 5, 6]])).logits
    assert logits.shape == (1, 3, toys.VOCAB)
    assert torch.isfinite(logits[..., kept]).all()
    assert torch.isneginf(logits[..., 1::2]).all()
    table = torch.nn.functional.normalize(
        toys.target().get_input_embeddings().weight.detach(), dim=1
    )
    assert int(model.kept[model.model.embed_tokens.row[5]]) == int(
        kept[(table[kept] @ table[5]).argmax()]
    )


def test_the_most_frequent_ids_are_kept():
    counts = torch.tensor([0, 9, 1, 5, 1, 0, 0, 2])
    assert kept_ids(counts, [6], 4).tolist() == [1, 3, 6, 7]
    assert kept_ids(counts, [6], 6).tolist() == [1, 2, 3, 4, 6, 7]


def test_a_draft_of_the_targets_width_starts_with_its_layers():
    student = build(toys.target(), Shape(2, 32, None), None, seed=0)
    assert torch.equal(
        student.model.layers[1].mlp.up_proj.weight,
        toys.target().model.layers[-1].mlp.up_proj.weight,
    )
    narrow = build(toys.target(), Shape(1, 16, None), None, seed=0)
    table = toys.target().get_input_embeddings().weight.detach()
    mine = narrow.get_input_embeddings().weight
    assert mine.shape == (toys.VOCAB, 16) and mine.norm() > 0.7 * table.norm()
    with pytest.raises(ConfigError, match=r"--hidden 12 is not a multiple .* head size, 8"):
        build(toys.target(), Shape(1, 12, None), None, seed=0)


@pytest.mark.parametrize("k", [1, 3])
def test_a_compact_draft_drafts_exactly(k):
    draft = compact(torch.arange(0, toys.VOCAB, 2))
    engine = SpeculativeEngine(toys.target(), draft, SpecConfig(num_assistant_tokens=k))
    for prompt, got in zip(toys.PROMPTS, engine.generate(toys.PROMPTS, 24)):
        assert torch.equal(got, toys.greedy(toys.target(), prompt, 24))
    assert engine.report.proposed > 0


# --- validation ---


@pytest.mark.parametrize("name", ["self", "noisy"])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_validation_foretells_what_the_engine_counts(name, k):
    """One forward over the target's text says what every cycle would accept."""
    draft = toys.drafts()[name]
    engine = SpeculativeEngine(toys.target(), draft, SpecConfig(num_assistant_tokens=k))
    for row in range(4):
        texts = engine.generate([toys.PROMPTS[row]], 24)
        report = engine.report
        told = heldout.HeldOut.of([toys.PROMPTS[row].tolist()], texts, ["x"]).matches(draft)
        assert heldout.walk(told, k) == (report.proposed, report.accepted, report.cycles)


def test_the_best_k_weighs_acceptance_against_cost():
    right = [[True] * 60, [True] * 60]
    half = [[True, False] * 30]
    assert heldout.best_k(right, cost=0.05)[0] == 8
    assert heldout.best_k(half, cost=0.05)[0] == 1
    assert heldout.best_k(half, cost=0.05)[1] == pytest.approx(2 / 1.05, rel=0.05)
    assert heldout.best_k(half, cost=2.0)[1] < 1
    assert heldout.best_k(half, cost=0.05, verify=2.0)[1] < 1
    assert heldout.agreement(half) == 0.5


# --- training ---


def test_training_converges_and_shuffled_notes_do_not_help(tmp_path):
    mine = trainer(tmp_path / "a")
    before = heldout.agreement(held_out().matches(mine.student.eval()))
    after = mine.run(150, FAR + time.monotonic(), lambda p: None)
    assert before < 0.03 and after.best > before + 0.12
    assert [h["step"] for h in after.history] == [25, 50, 75, 100, 125, 150]
    assert after.history[0]["by_kind"] == {"random": after.history[0]["agreement"]}
    other = torch.randperm(toys.VOCAB, generator=seeded(0)).int()
    wrong = corpus()._replace(top_ids=other[corpus().top_ids.long()])
    control = trainer(tmp_path / "b", wrong).run(150, FAR + time.monotonic(), lambda p: None)
    assert control.best < before + 0.05


class Stop(Exception):
    pass


def test_a_resumed_run_ends_like_one_without_a_stop(tmp_path):
    def stop(now: Progress) -> None:
        if now.step == 14:
            raise Stop

    whole = trainer(tmp_path / "whole")
    whole.run(24, FAR + time.monotonic(), lambda p: None)
    with pytest.raises(Stop):
        trainer(tmp_path / "stopped").run(24, FAR + time.monotonic(), stop)
    resumed = trainer(tmp_path / "stopped")
    assert resumed.progress.step == 12
    resumed.run(None, FAR + time.monotonic(), lambda p: None)
    assert resumed.progress == whole.progress
    for one, other in zip(whole.student.parameters(), resumed.student.parameters()):
        assert torch.equal(one, other)
    again = trainer(tmp_path / "whole").run(24, FAR + time.monotonic(), lambda p: None)
    assert again.step == 24  # nothing is left to do


def test_training_stops_on_time_and_keeps_the_best(tmp_path):
    mine = trainer(tmp_path)
    begin = time.monotonic()
    done = mine.run(None, begin + 3, lambda p: None)
    assert 0 < done.step <= done.total and time.monotonic() - begin < 20
    assert done.best == max(h["agreement"] for h in done.history)
    assert heldout.agreement(held_out().matches(mine.student)) == done.best


# --- the command ---


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoints.save(tmp_path_factory.mktemp("distill") / "target", toys.target())


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    rows = random_prompts(64, 5)
    path.write_text("\n".join(tiny_checkpoints.words(*row) for row in rows), encoding="utf-8")
    return path


def distill(checkpoint, output, *extra) -> int:
    flags = "--batch_size 16 --max_new_tokens 16 --tokens 1200 --steps 30 --quiet".split()
    return cli.main(
        ["distill", "--model", str(checkpoint), "--output", str(output), *flags, *extra]
    )


def test_the_command_writes_a_draft_that_everybody_can_load(checkpoint, asked, tmp_path, capsys):
    extra = [
        "--prompts",
        str(asked),
        "--vocab_subset",
        "64",
        "--layers",
        "1",
        "2",
        "--trial_steps",
        "5",
    ]
    assert distill(checkpoint, tmp_path, *extra) == 0
    values = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert values["steps"] == 30 and values["text_tokens"] >= 1200
    assert values["agreement_by_kind"].keys() == {"prompts"}
    assert values == json.loads((tmp_path / "distill.json").read_text())
    assert not (tmp_path / "work").exists()
    assert f"{values['text_tokens']} tokens" in (tmp_path / "README.md").read_text()

    sources = [loading.Source(str(place)) for place in (checkpoint, tmp_path)]
    pair = loading.load_pair(*sources, torch.float32, CPU)
    assert type(pair.draft) is CompactLlamaForCausalLM
    assert pair.draft.generation_config.num_assistant_tokens == values["best_k"]
    engine = SpeculativeEngine(pair.target, pair.draft)
    for prompt, got in zip(toys.PROMPTS, engine.generate(toys.PROMPTS, 12)):
        assert torch.equal(got, toys.greedy(toys.target(), prompt, 12))

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True).float()
    ids = toys.PROMPTS[0][None]
    with torch.no_grad():
        assert torch.equal(theirs(input_ids=ids).logits, pair.draft(input_ids=ids).logits)
    assisted = pair.target.generate(
        ids, assistant_model=theirs, max_new_tokens=12, do_sample=False, eos_token_id=None
    )
    assert torch.equal(assisted[0, ids.shape[1] :], toys.greedy(toys.target(), toys.PROMPTS[0], 12))


def test_the_directory_of_another_model_is_left_alone(checkpoint, capsys):
    before = {path.name for path in checkpoint.iterdir()}
    assert distill(checkpoint, checkpoint) == 2
    assert "holds another model" in capsys.readouterr().err
    assert {path.name for path in checkpoint.iterdir()} == before


def test_a_draft_with_all_ids_is_a_plain_llama(checkpoint, asked, tmp_path):
    assert distill(checkpoint, tmp_path, "--prompts", str(asked), "--keep_work") == 0
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is LlamaForCausalLM
    assert (tmp_path / "work").is_dir()


def test_other_settings_do_not_mix_with_a_run_under_way(checkpoint, asked, tmp_path, capsys):
    assert distill(checkpoint, tmp_path, "--prompts", str(asked), "--keep_work") == 0
    capsys.readouterr()
    assert distill(checkpoint, tmp_path, "--prompts", str(asked), "--seed", "1") == 2
    assert "begun with another seed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--layers", "0"], "--layers must be at least 1, not 0"),
        (["--minutes", "-1"], "--minutes must be at least 0"),
        (["--learning_rate", "nan"], "--learning_rate must be at least 0, not nan"),
        (["--seed", "-1"], "--seed must be from 0"),
        (["--vocab_subset", "99999"], "--vocab_subset 99999: the target has 97 ids"),
        (["--max_new_tokens", "300"], "together, but the target has 256 positions"),
        (["--prompts", "/nowhere"], "Cannot read /nowhere"),
        (["--layers", "1", "99"], "--layers 99: the target has ., and a draft must"),
        (["--hidden", "12"], "--hidden 12 is not a multiple"),
        (
            ["--max_input_tokens", "2", "--prompts", "{asked}"],
            "No prompt of .* is left to train on",
        ),
    ],
)
def test_bad_arguments_get_one_sentence(checkpoint, asked, tmp_path, capsys, extra, words):
    extra = [text.format(asked=asked) for text in extra]
    assert distill(checkpoint, tmp_path, *extra) in (1, 2)
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and re.search(words, error[0])


def test_prompts_that_are_no_yaml_are_refused_in_one_sentence(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text("[a, b")
    with pytest.raises(ConfigError, match=r"Cannot read .*p\.yaml"):
        prompts.read(str(path))
