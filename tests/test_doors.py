"""Transformers' own ways in: custom_generate as a callable and as a path, and the pipeline."""

from __future__ import annotations

import warnings

import pytest
import tiny_checkpoints
import torch
import toys
import transformers
from transformers import TextIteratorStreamer

import gaudi_spec
from gaudi_spec import BatchStreamer
from gaudi_spec.errors import ConfigError, UnsupportedOptionError

TEXT = toys.references()[3].tolist()
TOKENIZER = tiny_checkpoints.byte_tokenizer(TEXT)
IDS = toys.PROMPTS[3][None]
NEW = 20
TAKES_CALLABLES = tuple(map(int, transformers.__version__.split(".")[:2])) >= (4, 56)
WAYS = [
    "path",
    pytest.param(
        "callable",
        marks=pytest.mark.skipif(not TAKES_CALLABLES, reason="this Transformers takes a path only"),
    ),
]


def through(way, ids=IDS, draft="self", **options):
    """Calls `model.generate` in one of its two ways to us."""
    door = {"custom_generate": gaudi_spec.generate}
    if way == "path":
        door = {"custom_generate": gaudi_spec.custom_generate_path(), "trust_remote_code": True}
    options = dict(max_new_tokens=NEW, do_sample=False) | options
    return toys.target().generate(ids, assistant_model=toys.drafts()[draft], **door, **options)


@pytest.fixture(autouse=True)
def _no_report():
    gaudi_spec.generate(toys.target(), IDS, max_new_tokens=1)
    yield


def plain(ids=IDS, **options):
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return toys.target().generate(ids, do_sample=False, **dict(max_new_tokens=NEW) | options)


@pytest.mark.parametrize("way", WAYS)
def test_custom_generate_reaches_us_with_the_draft(way):
    assert through(way)[0, 17:].tolist() == TEXT[:NEW]
    assert gaudi_spec.last_report().schedule == "auto"
    assert through(way, num_assistant_tokens=5)[0, 17:].tolist() == TEXT[:NEW]
    report = gaudi_spec.last_report()
    assert report.acceptance_rate == 1.0 and report.cycles < NEW
    through(way, num_assistant_tokens=2)
    assert max(map(len, [gaudi_spec.last_report().proposed_at])) == 2


@pytest.mark.parametrize("way", WAYS)
def test_padding_ends_of_text_and_own_criteria_come_through(way):
    ids, mask = toys.left_pad(toys.PROMPTS)
    seen = []

    def criterion(input_ids, scores):
        seen.append(input_ids.shape)
        return torch.tensor([input_ids.shape[1] > width + 11] * 4 + [False])

    width = ids.shape[1]
    options = {"attention_mask": mask, "eos_token_id": [67, 46], "stopping_criteria": [criterion]}
    options["stopping_criteria"] = transformers.StoppingCriteriaList([criterion])
    got = through(way, ids, draft="noisy", **options)
    calls, seen[:] = list(seen), []
    assert got.tolist() == plain(ids, **options).tolist()
    assert calls == seen
    assert "criteria" in gaudi_spec.last_report().finish_reasons


@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_that_holds_pads_under_a_full_mask_keeps_them(way):
    ids = torch.cat([IDS[:, :5], torch.zeros(1, 2, dtype=torch.long), IDS[:, 5:]], 1)
    mask = torch.ones_like(ids)
    assert (
        through(way, ids, attention_mask=mask).tolist() == plain(ids, attention_mask=mask).tolist()
    )


@pytest.mark.parametrize("way", WAYS)
def test_streamers_come_through_and_get_the_prompt_once(way):
    calls = []

    class Recorder:
        def put(self, value):
            calls.append(value.tolist())

        def end(self):
            calls.append("end")

    through(way, streamer=Recorder())
    assert calls == [IDS.tolist(), *([token] for token in TEXT[:NEW]), "end"]
    streamer = TextIteratorStreamer(TOKENIZER, skip_prompt=True, timeout=60)
    through(way, streamer=streamer)
    assert "".join(streamer) == TOKENIZER.decode(TEXT[:NEW])
    ids, mask = toys.left_pad(toys.PROMPTS)
    batched = BatchStreamer(TOKENIZER)
    through(way, ids, attention_mask=mask, streamer=batched)
    assert "".join(text for row, text in batched if row == 3) == TOKENIZER.decode(TEXT[:NEW], True)


@pytest.mark.parametrize("way", WAYS)
def test_what_we_do_not_support_is_refused_there_too(way):
    with pytest.raises(UnsupportedOptionError, match="num_beams"):
        through(way, num_beams=2)


def test_stop_strings_come_through_the_path():
    options = {"stop_strings": "\N{EURO SIGN}", "tokenizer": TOKENIZER, "eos_token_id": 3}
    try:
        want = plain(**options)
    except ValueError:
        pytest.skip("this Transformers refuses the character")
    assert through("path", **options).tolist() == want.tolist()


@pytest.mark.parametrize("by", ["object", "name"])
def test_the_pipeline_reaches_us(by, tmp_path):
    """Both models by object or by path, as the command line takes them.

    J6: huggingface/transformers#34504
    """
    model = tiny_checkpoints.save(tmp_path / "t", toys.target(), TOKENIZER, eos=None)
    draft = tiny_checkpoints.save(tmp_path / "d", toys.target(), TOKENIZER, eos=None)
    options = {"max_new_tokens": NEW, "do_sample": False, "return_full_text": False}
    drafted = options | {"num_assistant_tokens": 5}
    want = transformers.pipeline("text-generation", str(model))("abc def", **options)
    gaudi_spec.last_report().cycles = 0
    if by == "object":
        ours = gaudi_spec.pipeline(
            model=toys.target(), tokenizer=TOKENIZER, assistant_model=toys.target()
        )
    else:
        ours = gaudi_spec.pipeline("text-generation", str(model), assistant_model=str(draft))
    assert ours("abc def", **drafted) == want
    assert gaudi_spec.last_report().acceptance_rate == 1.0
    assert gaudi_spec.last_report().emitted_tokens == NEW
    two = ours(["abc def", "ab"], batch_size=1, **options)
    assert [len(texts) for texts in two] == [1, 1] and two[0] == want
    assert "generate" not in vars(ours.model)


def test_the_pipeline_has_one_task():
    with pytest.raises(ConfigError, match="text-generation"):
        gaudi_spec.pipeline("summarization", toys.target())
