"""The CPU's own linear layer: right, and the same for a row whatever stands beside it."""

from __future__ import annotations

import pytest
import torch
import toys
from torch import nn

from gaudi_spec.config import SpecConfig
from gaudi_spec.device import get_device, linear
from gaudi_spec.engine import SpeculativeEngine
from gaudi_spec.errors import ConfigError
from gaudi_spec.models.equip import equip

pytestmark = pytest.mark.skipif(linear.library() is None, reason="no C compiler here")
SIZES = [(1, 1), (16, 16), (33, 7), (100, 13), (576, 192)]


def ours(model: nn.Module) -> nn.Module:
    return equip(model, get_device("cpu").kernels())


def layer(k: int, n: int, dtype: torch.dtype, bias: bool) -> nn.Linear:
    torch.manual_seed(k + n)
    return nn.Linear(k, n, bias=bias).to(dtype).eval()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 5, 7, 24])
@pytest.mark.parametrize(("k", "n"), SIZES)
@torch.no_grad()
def test_float32_is_right_to_rounding(k, n, rows, bias):
    plain = layer(k, n, torch.float32, bias)
    x = torch.randn(1, rows, k)
    want = plain.double()(x.double())
    got = ours(layer(k, n, torch.float32, bias))(x)
    # Any order of summation keeps to k roundings of the sum of magnitudes.
    room = (x.abs().double() @ plain.weight.abs().T + 1) * k * 2**-24
    assert got.shape == want.shape
    assert bool(((got - want).abs() <= room).all())


@pytest.mark.parametrize("rows", [1, 4, 9, 25, 70])
@pytest.mark.parametrize("piece", [1, 1000, linear._PIECE])
@pytest.mark.parametrize(("k", "n"), SIZES)
@torch.no_grad()
def test_bfloat16_is_the_exact_result_rounded_once(k, n, piece, rows, monkeypatch):
    """Beyond the kernel's rows too, however many pieces the weights are taken in."""
    monkeypatch.setattr(linear, "_PIECE", piece)
    monkeypatch.setattr(linear, "_SLOW_BFLOAT16", True)
    few = ours(layer(k, n, torch.bfloat16, True))
    x = torch.randn(rows, k, dtype=torch.bfloat16)
    exact = nn.functional.linear(x.double(), few.weight.double(), few.bias.double())
    unit = exact.abs().clamp(min=2**-6) * 2**-8 + 1e-4
    assert bool(((few(x).double() - exact).abs() <= unit).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_row_has_one_result_however_many_stand_beside_it(dtype):
    few = ours(layer(576, 65, dtype, True))
    x = torch.randn(linear.MAX_ROWS, 576).to(dtype)
    all_rows = few(x)
    for count in range(1, linear.MAX_ROWS):
        assert torch.equal(few(x[:count]), all_rows[:count])
    assert not torch.equal(few(x.flip(0)), all_rows)


@torch.no_grad()
def test_special_values_pass():
    for dtype in (torch.float32, torch.bfloat16):
        few = ours(layer(32, 8, dtype, False))
        x = torch.ones(3, 32, dtype=dtype)
        x[0, 5], x[1, 5] = float("nan"), float("inf")
        out = few(x)
        assert bool(out[0].isnan().all())
        assert bool((out[1].isinf() | out[1].isnan()).all())
        assert bool(out[2].isfinite().all())


@torch.no_grad()
def test_it_is_used_for_few_rows_of_its_own_kind_only(monkeypatch):
    model = nn.Sequential(layer(8, 8, torch.float32, True), layer(8, 8, torch.float64, True))
    ours(model)
    assert [type(part) for part in model] == [linear.FewRowsLinear, nn.Linear]
    calls = []
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: calls.append(len(x)) or x)
    many = linear.MAX_ROWS + 1
    for rows in (1, linear.MAX_ROWS, many):
        model[0](torch.zeros(rows, 8))
    assert calls == [many]
    narrow = ours(layer(8, 8, torch.bfloat16, True))
    for slow in (True, False):
        monkeypatch.setattr(linear, "_SLOW_BFLOAT16", slow)
        narrow(torch.zeros(many, 8, dtype=torch.bfloat16))
    assert calls == [many, many], "where bfloat16 is fast, PyTorch multiplies many rows"


@torch.no_grad()
def test_strided_rows_and_leading_dimensions():
    few = ours(layer(16, 5, torch.float32, True))
    x = torch.randn(3, 16, 2).transpose(1, 2)
    want = nn.functional.linear(x, few.weight, few.bias)
    assert torch.allclose(few(x), want, atol=1e-6)


def test_the_caller_s_model_keeps_its_layers_and_the_text_is_the_same():
    target = toys.target()
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12]]
    texts = {}
    for kernels in (None, ()):
        engine = SpeculativeEngine(target, toys.noisy(target), SpecConfig(kernels=kernels))
        texts[kernels] = [row.tolist() for row in engine.generate(prompts, 20)]
    assert texts[None] == texts[()]
    assert not any(isinstance(m, linear.FewRowsLinear) for m in target.modules())


def test_an_unknown_kernel_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"no kernel 'sdpa': choose from linear"):
        equip(nn.Linear(2, 2), get_device("cpu").kernels(), ["sdpa"])
    with pytest.raises(ConfigError, match="kernels must be a list of names"):
        SpecConfig(kernels="linear")
    assert SpecConfig.from_dict({"kernels": ["linear"]}).kernels == ("linear",)


def test_no_compiler_is_no_failure(monkeypatch):
    linear._library.cache_clear()
    monkeypatch.setenv("CC", "/nowhere/cc")
    monkeypatch.setenv("GAUDI_SPEC_CACHE", "/nowhere/cache")
    try:
        assert linear.library() is None and linear.missing()
        assert type(ours(nn.Linear(2, 2))) is nn.Linear
    finally:
        linear._library.cache_clear()


def test_it_compiles_inside_a_graph():
    few = ours(layer(32, 8, torch.float32, True))
    x = torch.randn(3, 32)
    with torch.no_grad():
        whole = torch.compile(lambda x: few(x).sum(-1), fullgraph=True, backend="aot_eager")
        assert torch.allclose(whole(x), few(x).sum(-1))


@pytest.mark.parametrize("rows", [2, 40])
@pytest.mark.parametrize("width", [8, 32])
def test_another_width_is_an_error_and_reads_nothing(rows, width):
    few = ours(layer(16, 8, torch.float32, True))
    with torch.no_grad(), pytest.raises(RuntimeError):
        few(torch.zeros(rows, width))
