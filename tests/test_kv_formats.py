"""What caches hold: error bounds, sizes, and that each model has its own."""

from __future__ import annotations

import pytest
import torch
import toys

from gaudi_spec import SpecConfig, SpeculativeEngine
from gaudi_spec.cache import SlotCache
from gaudi_spec.quant.facts import facts
from gaudi_spec.quant.kv import kv_format

NEW = 24
FAMILIES = ["gpt2", "gemma3", "gpt-bigcode"]
COMPUTE = [torch.float32, torch.bfloat16]


def cache(name, compute=torch.float32, limit=448.0, pow2=False, dim=64):
    form = kv_format(name, compute, limit, pow2)
    return SlotCache([(2, dim)] * 2, 3, 16, form, torch.device("cpu"))


def states(compute=torch.float32, dim=64):
    """Returns keys `[3, 2, 4, dim]` of very different sizes by token and head."""
    torch.manual_seed(0)
    size = torch.logspace(-3, 3, 24).view(3, 2, 4, 1)
    return (torch.randn(3, 2, 4, dim) * size).to(compute)


def written(held, new):
    """Returns what comes back of keys that were written to slots 5 to 8."""
    held.at(torch.arange(5, 9).expand(3, 4))
    keys, values = held.update(new, -new, 1)
    assert torch.equal(keys, -values)
    return keys[:, :, 5:9]


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("name", ["auto", "bf16", "int8", "fp8"])
def test_what_comes_back_is_within_the_bounds_of_the_format(name, compute):
    new = states(compute)
    held = cache(name, compute)
    got = written(held, new)
    assert got.dtype == compute
    size, largest = new.float().abs(), new.float().abs().amax(-1, keepdim=True)
    rounding = torch.finfo(compute).eps  # of scale and product
    bound = {
        "auto": torch.zeros_like(size),
        "bf16": size * 2**-8,
        "int8": largest / 127 / 2 + largest * rounding,
        "fp8": torch.maximum(size * 2**-4, largest / 448 * 2**-10) + size * 2 * rounding,
    }[name]
    error = (got.float() - new.float()).abs()
    assert (error <= bound * (1 + 1e-5)).all()
    if name in ("int8", "fp8"):
        assert error.max() > bound.max() / 8  # and no finer than it should be
    others = torch.cat([b.view(3, 16, -1)[:, :5] for b in held.buffers], -1)
    assert not others.any()


@pytest.mark.parametrize("limit", [240.0, 448.0])
def test_a_cards_format_has_its_range_and_powers_of_two(limit):
    held = cache("fp8", limit=limit, pow2=True)
    written(held, states())
    codes = held.keys[1].view(torch.float8_e4m3fn).float()
    assert limit / 2 < codes.abs().max() <= limit
    scales = held.key_scales[1][held.key_scales[1] > 0]
    assert torch.equal(scales.log2(), scales.log2().round())


def test_a_row_of_zeros_stays_zeros():
    for name in ("int8", "fp8"):
        got = written(cache(name), torch.zeros(3, 2, 4, 64))
        assert got.isfinite().all() and not got.any()


def test_zeroing_reaches_every_buffer():
    for name in ("auto", "int8", "fp8"):
        held = cache(name)
        written(held, states())
        assert len(held.buffers) == (4 if name == "auto" else 8)
        held.zero()
        assert not any(buffer.any() for buffer in held.buffers)


@pytest.mark.parametrize(("name", "bits"), [("auto", 32), ("bf16", 16), ("int8", 8), ("fp8", 8)])
def test_bytes_are_what_the_format_predicts(name, bits):
    held = cache(name, dim=128)
    scales = 32 / 128 if bits == 8 else 0
    found = facts(toys.target(), held)["kv_cache"]
    assert found["bytes"] == 2 * 2 * 3 * 16 * 2 * 128 * (bits + scales) / 8
    assert found["bits"] == bits + scales


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", n) for n in ("bf16", "int8", "fp8")] + [(f, "int8") for f in FAMILIES],
)
def test_a_drafts_cache_costs_little_acceptance_and_no_text(family, name):
    """H7: the draft is the target itself, so everything that is lost is the cache's."""
    config = SpecConfig(num_assistant_tokens=3, draft_kv_dtype=name)
    running = SpeculativeEngine(toys.target(family), toys.drafts(family)["self"], config)
    got = running.generate(toys.PROMPTS, NEW)
    toys.assert_equal_rows(got, [text[:NEW] for text in toys.references(family)])
    assert running.report.acceptance_rate > 0.6
    held = {role: values["kv_cache"]["scheme"] for role, values in running.facts().items()}
    assert held == {"target": "float32", "draft": "bfloat16" if name == "bf16" else name}


@pytest.mark.parametrize(
    ("target", "draft"), [("int8", "auto"), ("fp8", "int8"), ("bf16", "fp8"), ("int8", "int8")]
)
def test_each_model_has_a_cache_of_its_own_format(target, draft):
    """H7: with a quantized target cache the text is that of the same target alone."""
    config = SpecConfig(num_assistant_tokens=4, target_kv_dtype=target, draft_kv_dtype=draft)
    running = SpeculativeEngine(toys.target(), toys.drafts()["noisy"], config)
    alone = SpeculativeEngine(toys.target(), None, config.without_draft())
    got = running.generate(toys.PROMPTS, NEW)
    toys.assert_equal_rows(got, alone.generate(toys.PROMPTS, NEW))
    stores = {role: held.cache.keys[0].dtype for role, held in running.runtime.models.items()}
    dtypes = {"auto": torch.float32, "bf16": torch.bfloat16}
    dtypes |= {"int8": torch.int8, "fp8": torch.uint8}
    assert stores == {"target": dtypes[target], "draft": dtypes[draft]}


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_rejected_slots_of_a_quantized_cache_are_never_seen(name):
    """Spoiling what lies behind each row's text, scales too, changes nothing."""
    config = SpecConfig(num_assistant_tokens=3, target_kv_dtype=name, draft_kv_dtype=name)
    running = SpeculativeEngine(toys.target(), toys.drafts()["noisy"], config)
    want = running.generate(toys.PROMPTS, NEW)
    accepted = running.report.accepted_at
    texts = [prompt.tolist() for prompt in toys.PROMPTS]
    for outcome in running.cycles(toys.PROMPTS, NEW):
        for text, row in zip(texts, outcome):
            text.extend(row.tokens)
        for role, lag in (("target", 1), ("draft", 2)):
            held = running.runtime.models[role].cache
            for buffer in held.buffers:
                for row, text in enumerate(texts):
                    buffer.view(held.batch, held.slots, -1)[row, max(len(text) - lag, 0) :] = 77
    got = [text[len(prompt) :] for text, prompt in zip(texts, toys.PROMPTS)]
    toys.assert_equal_rows(got, want)
    assert running.report.accepted_at == accepted
