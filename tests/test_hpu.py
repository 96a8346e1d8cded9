"""The same laws on a Gaudi card: `make test-hpu`. Nobody has run these on a card yet.

`GAUDI_SPEC_TEST_DEVICE` names another device, such as hpu-emulated, to try the tests themselves.
"""

from __future__ import annotations

import copy
import functools
import os

import pytest
import torch
import toys

from gaudi_spec import SpecConfig, SpeculativeEngine, checker
from gaudi_spec.device import DEVICES
from gaudi_spec.models.equip import equip
from gaudi_spec.models.hf import HFCausalLM
from gaudi_spec.models.shadow import shadow
from gaudi_spec.sampling import noise

pytestmark = pytest.mark.hpu

NAME = os.environ.get("GAUDI_SPEC_TEST_DEVICE", "hpu")
FAMILIES = ["llama", "gpt2", "qwen3", "gemma2", "mistral-window"]
NEW = 24
K = 3
FUSED = SpecConfig(
    num_assistant_tokens=K,
    batch_size=len(toys.PROMPTS),
    max_length=96,
    bucket_size=48,
    prefill_chunks=(16,),
    compile="graph",
)
CONFIGS = {
    "whole cycle": FUSED,
    "split cycle": FUSED.replace(fuse_cycle=False),
    "no graphs": FUSED.replace(compile="eager"),
}


@pytest.fixture(scope="module")
def device():
    """The device; without it every test here is skipped."""
    reason = DEVICES[NAME].missing()
    if reason:
        pytest.skip(reason)
    return DEVICES[NAME]()


@functools.cache
def moved(family: str, draft: str | None, place: torch.device, dtype=torch.float32):
    """Returns a copy of a toy, or of its draft, on the device."""
    model = toys.drafts(family)[draft] if draft else toys.target(family)
    return copy.deepcopy(model).to(dtype).to(place)


def engine(device, config: SpecConfig, family: str = "llama", draft: str = "noisy"):
    place = device.torch_device
    models = moved(family, None, place), moved(family, draft, place)
    return SpeculativeEngine(*models, config, device)


def test_noise_is_that_of_the_cpu(device):
    """Products of 32-bit integers wrap around, so a seed gives one text everywhere."""
    words = torch.arange(-(1 << 31), 1 << 31, 999_983).int()
    keys = torch.tensor(noise.row_keys(27, 3)).int()
    place = torch.arange(20).expand(3, 20)
    there = [tensor.to(device.torch_device) for tensor in (words, keys, place)]
    assert torch.equal(noise.mix(there[0]).cpu(), noise.mix(words))
    got = noise.exponential(*there[1:], noise.DRAFT, 200).cpu()
    assert torch.allclose(got, noise.exponential(keys, place, noise.DRAFT, 200), rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_one_forward_is_close_to_the_cpu(device, family, record_property):
    """Float32 logits; a greedy choice can flip only where the gap is smaller than this."""
    ids = toys.PROMPTS[-1][None]
    want = toys.target(family)(ids).logits
    got = moved(family, None, device.torch_device)(ids.to(device.torch_device)).logits.cpu()
    worst = float((got - want).abs().max() / want.abs().max())
    record_property("largest relative difference", worst)
    assert worst < 1e-4, f"{worst:.2g} of the largest logit"


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("draft", ["self", "noisy", "unrelated"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate_on_the_cpu(device, family, draft, config):
    """Ragged batch of five, twice over the same buffers."""
    speculative = engine(device, CONFIGS[config], family, draft)
    want = [text[:NEW] for text in toys.references(family)]
    for _ in range(2):
        got = speculative.generate(toys.PROMPTS, NEW)
        reasons = [
            checker.explain(toys.target(family), prompt, ours, other)
            for prompt, ours, other in zip(toys.PROMPTS, got, want)
        ]
        assert reasons == ["identical"] * len(want)
    assert speculative.report.acceptance_rate == 1.0 or draft != "self"


def test_bfloat16_differs_at_near_ties_only(device):
    """Against one plain forward of the same model on the same device."""
    target, draft = (moved("llama", d, device.torch_device, torch.bfloat16) for d in (None, "self"))
    for prompt, text in zip(
        toys.PROMPTS, SpeculativeEngine(target, draft, FUSED, device).generate(toys.PROMPTS, NEW)
    ):
        found = checker.greedy_differences(target, prompt, text)
        assert [difference for difference in found if not difference.near_tie] == []


@pytest.mark.parametrize("config", ["whole cycle", "split cycle"])
def test_first_request_after_the_warm_up_compiles_nothing(device, config):
    """By the card's own count: what is outside the graphs must be compiled in the warm-up too."""
    speculative = engine(device, CONFIGS[config].replace(strict_shapes=True))
    speculative.warm_up(5, 96, quiet=True)
    before = count(device)
    speculative.generate(toys.PROMPTS, NEW)
    assert count(device) - before == 0


@pytest.mark.parametrize("config", ["whole cycle", "split cycle"])
def test_later_requests_compile_nothing_and_leave_nothing_to_the_host(device, config):
    """Other prompts, budgets and ends of text; graphs, recipes and fallbacks stand still."""
    speculative = engine(device, CONFIGS[config].replace(strict_shapes=True))
    speculative.generate(toys.PROMPTS, NEW)
    recipes, fallbacks = count(device), device.fallbacks()
    for call in range(6):
        rows = toys.prompts(*range(1 + call, 40, 9 + call), seed=call)[:5]
        ends = [int(toys.references()[call % 5][call])] if call % 2 else []
        speculative.generate(rows, 5 + 4 * call, eos_token_ids=ends)
    assert count(device) - recipes == 0
    assert device.fallbacks() == fallbacks
    assert speculative.report.graphs.after_warmup == 0 < speculative.report.graphs.hits


def count(device) -> int:
    """Returns the recipes built so far; a card that does not count them fails the test."""
    device.synchronize()
    recipes = device.recipes()
    assert recipes is not None, "metric_global('graph_compilation') gives nothing"
    return recipes


@torch.no_grad()
def test_a_replay_does_what_the_work_does(device):
    """State changed in place inside a capture, by the operations that cycles use."""
    place = device.torch_device
    inputs = torch.arange(6.0).view(3, 2).to(place)
    where = torch.tensor([0, 4, 5]).to(place)

    def make():
        cache, length = torch.zeros(8, 2).to(place), torch.zeros(3, dtype=torch.long).to(place)

        def work() -> torch.Tensor:
            cache.index_copy_(0, where, inputs + length[:, None])
            length.add_(1)
            kept = torch.where(length > 1, length, -length)
            return cache.sum(1)[:3] * 2 + torch.cumprod(kept, 0)

        return work

    plain, graph = make(), device.capture(make())
    for step in range(4):
        want = plain().cpu()
        got = graph()
        device.synchronize()
        assert torch.equal(got.cpu(), want), f"call {step}"
        inputs.add_(step)


@torch.no_grad()
def test_a_replay_reads_what_the_host_wrote_before_it(device):
    """Replays are asynchronous: copies from the host must keep their place in the order."""
    place = device.torch_device
    cursor, total = torch.zeros(4, dtype=torch.long).to(place), torch.zeros(4).to(place)

    def work() -> torch.Tensor:
        total.add_(cursor)
        return total * 1

    graph = device.capture(work)
    for value in range(50):
        cursor.copy_(torch.full((4,), value))
        result = graph()
    assert result.cpu().tolist() == [float(sum(range(50)))] * 4


def test_memory_is_counted(device):
    memory = device.memory()
    assert 0 <= memory["allocated"] <= memory["max_allocated"] <= memory["total"]
    assert memory["total"] > 1


def test_integers_above_two_to_the_24_are_exact(device):
    """Token ids and slots: 32 bits would do, a float of 24 would not."""
    place = device.torch_device
    large = torch.tensor([2**24 + 1, 2**30 + 1], dtype=torch.long).to(place)
    assert (large + 1).cpu().tolist() == [2**24 + 2, 2**30 + 2]
    assert (large - large.flip(0)).abs().cpu().tolist() == [2**30 - 2**24] * 2


def test_the_card_is_described(device):
    assert device.describe().strip(" ,") and device.torch_device.type in ("hpu", "cpu")


@pytest.mark.parametrize("name", ["sdpa", "rms_norm", "rope"])
def test_a_fused_kernel_is_close_to_plain_operations(device, name, record_property):
    """In the shapes of verification: four tokens a row, each row at its own position."""
    if name not in device.kernels():
        pytest.skip(f"this build has no {name}")
    place, start = device.torch_device, torch.tensor([[3], [40], [17]])
    ids = (torch.arange(12).reshape(3, 4) + 1).to(place)
    positions = (start + torch.arange(4)).to(place)
    got = []
    for names in ([name], []):
        model = equip(shadow(moved("llama", None, place)), device.kernels(), names)
        adapter = HFCausalLM(model, 3, 64)
        with torch.no_grad():
            got.append(adapter.forward(ids, positions).float().cpu())
    difference = float((got[0] - got[1]).abs().max())
    record_property("difference", difference)
    assert difference < 1e-3 * float(got[1].abs().max())
