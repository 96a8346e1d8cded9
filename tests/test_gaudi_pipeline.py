"""The pipeline of Optimum Habana's example: its arguments, its results, the target's own texts."""

import copy
import inspect
import logging
from pathlib import Path

import optimum_habana
import pytest
import tiny_checkpoints
import torch
import toys
from transformers import GenerationConfig, TextGenerationPipeline

import gaudi_spec
from gaudi_spec import flags, gaudi_pipeline
from gaudi_spec.cli import run_command
from gaudi_spec.errors import UnsupportedOptionError

ONE, TWO = [20, 30, 40], [9, 8, 55, 44, 21]
PROMPTS = [tiny_checkpoints.words(*ONE), tiny_checkpoints.words(*TWO)]
NEW = 8
LOGGER = logging.getLogger(__name__)


def arguments(*words):
    need = ["--model_name_or_path", "x", "--max_new_tokens", str(NEW), "--warmup", "1"]
    return flags.parser().parse_args([*need, *words])


def pipe(*words, draft="noisy", config=None, **options):
    model, assistant = toys.target(), toys.drafts()[draft] if draft else None
    tokenizer = tiny_checkpoints.word_tokenizer()
    tokenizer.padding_side = "left"
    return gaudi_spec.GaudiTextGenerationPipeline(
        arguments(*words), LOGGER, model, tokenizer, config, assistant_model=assistant, **options
    )


def whole(prompt, new=NEW):
    """Returns prompt and continuation."""
    ids = [*prompt, *toys.greedy(toys.target(), torch.tensor(prompt), new).tolist()]
    return tiny_checkpoints.word_tokenizer().decode(ids, skip_special_tokens=True)


def test_the_constructor_has_their_arguments_and_a_draft():
    parameters = inspect.signature(gaudi_spec.GaudiTextGenerationPipeline).parameters
    theirs = """args logger model tokenizer generation_config use_with_langchain
    warmup_on_init""".split()
    assert [*parameters][: len(theirs)] == theirs and "assistant_model" in parameters
    assert parameters["use_with_langchain"].default is False
    assert parameters["warmup_on_init"].default is True
    assert issubclass(gaudi_spec.GaudiTextGenerationPipeline, TextGenerationPipeline)


@pytest.mark.parametrize("draft", ["self", "noisy", None])
def test_texts_are_the_targets_own(draft):
    run = pipe(draft=draft, warmup_on_init=False)
    assert run(PROMPTS) == [whole(ONE), whole(TWO)]
    assert run(PROMPTS[0]) == whole(ONE)
    assert (gaudi_spec.last_report().proposed > 0) == (draft is not None)


def test_the_result_for_langchain_has_its_form_and_ends():
    model = toys.target()
    kept = model.generation_config.eos_token_id
    eos = toys.greedy(model, torch.tensor(ONE), NEW).tolist()[3]
    try:
        model.generation_config.eos_token_id = eos
        going = pipe(warmup_on_init=False)(PROMPTS[0])
        ended = pipe(warmup_on_init=False, use_with_langchain=True)(PROMPTS[0])
        asked = pipe("--no-ignore_eos", warmup_on_init=False)(PROMPTS[0])
    finally:
        model.generation_config.eos_token_id = kept
    assert going == whole(ONE)
    assert ended == [{"generated_text": asked}] and asked == whole(ONE, 4) != going


def test_prompts_are_padded_to_one_width_and_cut(monkeypatch):
    seen = []
    original = gaudi_pipeline.hf.generate

    def generate(model, ids, **options):
        seen.append(tuple(ids.shape))
        return original(model, ids, **options)

    monkeypatch.setattr(gaudi_pipeline.hf, "generate", generate)
    pipe("--batch_size", "3")(PROMPTS)
    assert pipe("--max_input_tokens", "4", warmup_on_init=False)(PROMPTS[1]) == whole(TWO[:4])
    assert seen == [(3, 100), (2, 100), (1, 4)]


def test_their_generation_config_is_read_and_kept():
    config = GenerationConfig(max_new_tokens=5)
    for name, value in dict(static_shapes=True, bucket_size=-1, reuse_cache=True).items():
        setattr(config, name, value)
    before = copy.deepcopy(vars(config))
    assert pipe(config=config)(PROMPTS[0]) == whole(ONE, 5)
    assert vars(config) == before
    config.num_beams = 4
    with pytest.raises(UnsupportedOptionError, match="num_beams"):
        pipe(config=config)


def test_temperature_and_top_p_count_when_sampling():
    config = GenerationConfig(do_sample=True, top_k=None)
    run = pipe("--do_sample", "--temperature", "0.5", "--top_p", "0.9", config=config)
    assert (run.generation_config.temperature, run.generation_config.top_p) == (0.5, 0.9)
    cold = pipe("--do_sample", "--temperature", "0.0001", config=config, warmup_on_init=False)
    assert cold(PROMPTS) == [whole(ONE), whole(TWO)]


def test_arguments_of_a_call_are_refused_by_name():
    with pytest.raises(UnsupportedOptionError, match="max_length=3"):
        pipe(warmup_on_init=False)(PROMPTS, max_length=3)


# The program


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    target, draft = tiny_checkpoints.make(tmp_path_factory.mktemp("checkpoints"))
    return ["--model_name_or_path", str(target), "--assistant_model", str(draft)]


def test_the_program_prints_what_theirs_prints(models, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = "--use_hpu_graphs --use_kv_cache --n_iterations 2 --warmup 1 --batch_size 2 -q"
    args += f" --profiling_steps 1 --max_new_tokens {NEW}"
    code = run_command(gaudi_pipeline.main, [*models, *args.split(), "--prompt", *PROMPTS])
    out, err = capsys.readouterr()
    assert code == 0, err
    lines = [line for line in out.splitlines() if line]
    want = [
        line.format(i=i, row=row)
        for i in (1, 2)
        for row in (1, 2)
        for line in optimum_habana.PIPELINE_LINES[:2]
    ]
    want += [line.format(n=2) for line in optimum_habana.PIPELINE_LINES[2:]]
    assert [line.startswith(start) for line, start in zip(lines, want)] == [True] * len(want)
    assert lines[1] == f"Generated Text[1][1]: {whole(ONE)!r}"
    assert lines[3] == f"Generated Text[1][2]: {whole(TWO)!r}"
    assert lines[-2].endswith(" tokens/second") and lines[-1].startswith("Accepted: ")
    assert len(list(Path("hpu_profile/generate").iterdir())) == 1


def test_the_program_runs_on_the_emulated_card(models, capsys):
    """Where cycles are captured; models on it are on the CPU for everybody else."""
    args = f"--device hpu-emulated --n_iterations 1 --warmup 0 -q --max_new_tokens {NEW}".split()
    code = run_command(gaudi_pipeline.main, [*models, *args, "--prompt", PROMPTS[0]])
    out, err = capsys.readouterr()
    assert code == 0, err
    assert f"Generated Text[1][1]: {whole(ONE)!r}" in out
    assert gaudi_spec.last_report().graphs.warmup > 0


@pytest.mark.parametrize("flag", ["--compare_baseline", "--stream", "--num_return_sequences=2"])
def test_flags_without_use_are_refused(models, capsys, flag):
    assert run_command(gaudi_pipeline.main, [*models, flag]) == 2
    err = capsys.readouterr().err
    assert "does nothing in text_generation_pipeline.py" in err and err.count("\n") == 1
