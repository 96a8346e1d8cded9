"""Intel's fused kernels in Transformers' models, over the emulator's plain ones."""

from __future__ import annotations

import pytest
import torch
import toys

from gaudi_spec.config import SpecConfig
from gaudi_spec.device import standin
from gaudi_spec.device.emulated import EmulatedHpuDevice
from gaudi_spec.engine import SpeculativeEngine
from gaudi_spec.models.equip import FUSED, equip
from gaudi_spec.models.shadow import shadow

NAMES = ("sdpa", "rms_norm", "rope")
NEW = 16
FAMILIES = "llama qwen2 qwen3 mistral-window phi3 gemma2 gemma3 gpt2 falcon cohere olmo2".split()


@pytest.fixture
def device():
    yield EmulatedHpuDevice(check=False)
    standin.remove()


def counted(kernels: dict, calls: dict) -> dict:
    def wrap(name, kernel):
        def call(*args):
            calls[name] = calls.get(name, 0) + 1
            return kernel(*args)

        return call

    return {name: wrap(name, kernel) for name, kernel in kernels.items()}


def text(family: str, device, kernels) -> list[torch.Tensor]:
    config = SpecConfig(num_assistant_tokens=3, compile="eager", kernels=kernels)
    target = toys.target(family)
    return SpeculativeEngine(target, toys.noisy(target), config, device).generate(toys.PROMPTS, NEW)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kernel_leaves_the_text_as_it_is(family, device):
    want = [row[:NEW] for row in toys.references(family)]
    for kernels in (None, *((name,) for name in NAMES)):
        toys.assert_equal_rows(text(family, device, kernels), want)


def test_a_llama_uses_all_of_them_and_each_can_be_left_out(device):
    layers = toys.target().config.num_hidden_layers
    ids = torch.arange(1, 9)[None]
    mask = torch.zeros(1, 1, 8, 8).masked_fill(~torch.ones(8, 8).tril().bool(), -1e9)
    with torch.no_grad():
        want = toys.target()(ids).logits
        for names in ([], *([name] for name in NAMES), NAMES):
            calls: dict[str, int] = {}
            model = equip(shadow(toys.target()), counted(device.kernels(), calls), names)
            got = model(ids, attention_mask=mask).logits
            assert torch.allclose(got, want, atol=1e-4)
            times = {"sdpa": layers, "rms_norm": 2 * layers + 1, "rope": 2 * layers}
            assert calls == {name: times[name] for name in names}
    assert toys.target().config._attn_implementation != FUSED


def test_another_norm_and_another_rotation_keep_their_own(device):
    calls: dict[str, int] = {}
    kernels = counted(device.kernels(), calls)
    with torch.no_grad():
        equip(shadow(toys.target("gemma2")), kernels, ["rms_norm"])(torch.arange(1, 5)[None])
        equip(shadow(toys.target("cohere")), kernels, ["rope"])(torch.arange(1, 5)[None])
    assert calls == {}


def test_a_wrong_kernel_changes_the_text(device, monkeypatch):
    wrong = device.kernels() | {"rope": lambda x, cos, sin: x}
    monkeypatch.setattr(device, "kernels", lambda: wrong)
    want = [row[:NEW].tolist() for row in toys.references()]
    assert [row.tolist() for row in text("llama", device, ("rope",))] != want


def test_a_build_without_a_kernel_does_without(device, monkeypatch):
    import habana_frameworks.torch.hpex.kernels as kernels

    monkeypatch.delattr(kernels, "FusedSDPA")
    assert set(device.kernels()) == {"rms_norm", "rope"}
