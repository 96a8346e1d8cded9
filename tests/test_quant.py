"""Quantized weights: what they are, what they cost in accuracy, and that drafts change no text."""

from __future__ import annotations

import copy
import gc
import json
import math
import warnings
import weakref

import pytest
import tiny_checkpoints
import torch
import toys
from torch import nn

from gaudi_spec import ConfigError, SpecConfig, SpeculativeEngine, checker
from gaudi_spec.cache import SlotCache
from gaudi_spec.cli import main
from gaudi_spec.config import KV_DTYPES, QUANT_SCHEMES
from gaudi_spec.device import standin
from gaudi_spec.device.cpu import CpuDevice
from gaudi_spec.device.cuda import CudaDevice
from gaudi_spec.device.emulated import EmulatedHpuDevice
from gaudi_spec.device.linear import MAX_ROWS, multiplies_int8
from gaudi_spec.models.equip import equip
from gaudi_spec.models.shadow import shadow
from gaudi_spec.quant import apply, fp8, linear
from gaudi_spec.quant.facts import parts
from gaudi_spec.quant.kv import kv_format
from gaudi_spec.quant.linear import KINDS, QuantLinear

SCHEMES = sorted(KINDS)
NEW = 24
GENERATIONS = {"gaudi2": 240.0, "gaudi3": 448.0}


@pytest.fixture(autouse=True)
def _no_stand_in_left():
    yield
    standin.remove()


def expected(family="llama", new=NEW):
    return [text[:new] for text in toys.references(family)]


def engine(draft=None, target=None, **settings):
    config = SpecConfig(num_assistant_tokens=3, **settings)
    return SpeculativeEngine(target or toys.target(), draft, config)


def layers(model):
    return [module for module in model.modules() if isinstance(module, QuantLinear)]


# Drafts never change the text.


@pytest.mark.parametrize(
    ("family", "scheme"),
    [("llama", s) for s in SCHEMES] + [("gpt2", "int8"), ("falcon", "fp8"), ("gemma3", "int8wo")],
)
def test_any_draft_quantization_leaves_the_targets_text(family, scheme):
    """H2: the target is not quantized, its draft is."""
    draft = toys.drafts(family)["self"]
    config = SpecConfig(num_assistant_tokens=3, draft_quant=scheme)
    running = SpeculativeEngine(toys.target(family), draft, config)
    toys.assert_equal_rows(running.generate(toys.PROMPTS, NEW), expected(family))
    assert layers(running.runtime.models["draft"].model)
    assert not layers(running.runtime.target.model)
    assert running.report.acceptance_rate > 0.2


@pytest.mark.parametrize(
    ("scheme", "kv", "draft"),
    [(s, "auto", "noisy") for s in SCHEMES]
    + [("int8", "int8", "unrelated"), ("fp8", "fp8", "unrelated"), ("int4wo", "bf16", "self")],
)
def test_a_quantized_target_with_a_draft_equals_itself_alone(scheme, kv, draft):
    """H2: the target is quantized, its draft is not; a difference must be a proven near-tie."""
    settings = dict(target_quant=scheme, target_kv_dtype=kv)
    alone = engine(**settings).generate(toys.PROMPTS, 40)
    running = engine(toys.drafts()[draft], **settings)
    together = running.generate(toys.PROMPTS, 40)
    for prompt, ours, other in zip(toys.PROMPTS, together, alone):
        verdict = checker.explain(running.target_model, prompt, ours, other)
        assert verdict == "identical" or "a near-tie" in verdict, verdict
    assert not layers(running.runtime.models["draft"].model)


def test_the_checker_refutes_the_text_of_other_weights():
    """Control of the test above: what int4 writes is no near-tie of what int8 writes."""
    eight, four = engine(target_quant="int8"), engine(target_quant="int4wo")
    ours, other = eight.generate(toys.PROMPTS, 40), four.generate(toys.PROMPTS, 40)
    verdicts = [
        checker.explain(eight.target_model, prompt, a, b)
        for prompt, a, b in zip(toys.PROMPTS, ours, other)
    ]
    assert any("NOT a near-tie" in verdict for verdict in verdicts), verdicts


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_token_does_not_depend_on_those_beside_it(scheme):
    """Else verifying K+1 tokens would not give what decoding them one by one gives."""
    torch.manual_seed(0)
    layer = KINDS[scheme](torch.randn(64, 128), None)
    x = torch.randn(9, 128)
    x[4] *= 100  # would decide the scale of all
    together, alone = layer(x), torch.cat([layer(row[None]) for row in x])
    bound = 2**-7 if scheme.endswith("wo") else 1e-5  # those kernels round to bfloat16
    assert ((together - alone).abs() <= bound * alone.abs().amax(1, keepdim=True)).all()


# Accuracy.


def weights_of(layer):
    """Returns what the layer multiplies by, `[N, K]`: one input at a time."""
    return layer.product(torch.eye(layer.in_features)).float().t()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_are_within_the_bounds_of_their_scheme(scheme):
    torch.manual_seed(0)
    weight = torch.randn(64, 128) * torch.logspace(-3, 1, 64)[:, None]
    layer = KINDS[scheme](weight, None)
    error = weights_of(layer) - weight
    if scheme == "int8":  # the bounds are those of what is stored
        weight, error = layer.rotate(weight), layer.rotate(error)
    error = error.abs()
    largest = weight.abs().amax(1, keepdim=True)
    if scheme in ("int8", "int8wo"):
        bound = largest / 127 / 2 + (largest * 2**-7 if scheme == "int8wo" else largest * 1e-5)
    elif scheme == "int4wo":
        groups = weight.view(64, -1, linear.GROUP)
        spread = groups.amax(-1) - groups.amin(-1)
        step = (spread / 15).repeat_interleave(linear.GROUP, 1)
        bound = step / 2 + largest * 2**-6  # scale, zero and output in bfloat16
    else:
        bound = torch.maximum(weight.abs() * 2**-4, largest / 448 * 2**-10) * (1 + 1e-5)
    assert (error <= bound).all()
    assert (error > 0).any()


def test_codes_use_their_whole_range():
    """A bound holds for a finer grid too; this one is as coarse as it says."""
    torch.manual_seed(0)
    weight = torch.randn(64, 4096)
    codes = linear.Int8(weight, None).codes
    assert codes.min() == -127 and codes.max() == 127 and codes.dtype == torch.int8
    four = linear.Int4WeightOnly(weight, None)
    assert four.codes.numel() * 2 == weight.numel()
    group = weights_of(four)[0, : linear.GROUP]
    assert 12 <= len(group.unique()) <= 16


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_torchao_computes_the_same(scheme):
    """An independent implementation of the same schemes, where it is installed."""
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 64, bias=False))
    ours = KINDS[scheme](model[0].weight.detach().clone(), None)
    config = {
        "int8": quantization.Int8DynamicActivationInt8WeightConfig,
        "fp8": lambda: quantization.Float8DynamicActivationFloat8WeightConfig(
            granularity=quantization.PerRow()
        ),
    }[scheme]()
    x = torch.randn(5, 128)
    if scheme == "fp8":
        model, x = model.bfloat16(), x.bfloat16()
    try:
        quantization.quantize_(model, config)
        want = model(x)
    except Exception as error:  # a kernel that this machine lacks
        pytest.skip(f"torchao cannot run {scheme} here: {error}")
    assert torch.allclose(ours(x).float(), want.float(), atol=2e-2 * float(want.abs().max()))


def test_rotation_keeps_products_and_spreads_outliers():
    """One channel a thousand times the others leaves the others their codes."""
    torch.manual_seed(0)
    for size, block in ((192, 64), (512, 512), (20, 4), (7, 1)):
        layer, rows = linear.Int8(torch.randn(8, size), None), torch.randn(3, size)
        assert layer.block == block
        matrix = torch.block_diag(*[linear.hadamard(block, rows.device)] * (size // block))
        assert torch.allclose(layer.rotate(rows), rows @ matrix, atol=1e-5)
        assert torch.allclose(layer.rotate(layer.rotate(rows)), rows, atol=1e-5)
    torch.manual_seed(0)
    weight, x = torch.randn(64, 192), torch.randn(5, 192)
    x[:, 70] *= 1000
    weight[:, 70] = 0
    want = x @ weight.t()
    error = (linear.Int8(weight, None).product(x) - want).norm()
    codes, scale = linear.int8_codes(x)
    plain = ((codes.float() * scale) @ weight.t() - want).norm()
    assert error < 0.8 * plain


@pytest.mark.skipif(not multiplies_int8(), reason="no AVX512-VNNI or no C compiler here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("k", "n"), [(576, 192), (1536, 13), (2048, 7), (20, 5), (100, 33)])
@torch.no_grad()
def test_our_own_kernel_computes_what_pytorch_s_does(k, n, dtype):
    torch.manual_seed(k)
    plain = linear.Int8(torch.randn(n, k), torch.randn(n).to(dtype)).eval()
    few = equip(nn.Sequential(copy.copy(plain)), CpuDevice().kernels())[0]
    assert type(few) is linear.FewRowsInt8 and few.codes is plain.codes
    x = torch.randn(MAX_ROWS, k).to(dtype)
    x[0, 3] = 100
    got, want = few(x[None])[0], plain(x)
    off = (got - want).float().norm(dim=1) / want.float().norm(dim=1)
    # A number on the edge between two codes may go to either; bfloat16 rounds there twice.
    assert got.dtype == dtype and bool((off < (1e-3 if dtype == torch.float32 else 6e-3)).all())
    for rows in range(1, MAX_ROWS):
        assert torch.equal(few(x[:rows]), got[:rows])
    assert not torch.equal(few(x.flip(0)), got)


@pytest.mark.skipif(not multiplies_int8(), reason="no AVX512-VNNI or no C compiler here")
@torch.no_grad()
def test_our_own_kernel_lets_special_values_through():
    few = linear.FewRowsInt8(torch.randn(8, 48), None)
    x = torch.ones(4, 48)
    x[0, 5], x[1, 40], x[2] = float("nan"), float("inf"), 0
    out = few(x)
    assert bool(out[:2].isnan().all()) and bool((out[2] == 0).all())
    assert bool(out[3].isfinite().all())


@pytest.mark.skipif(not multiplies_int8(), reason="no AVX512-VNNI or no C compiler here")
@torch.no_grad()
def test_our_own_kernel_is_used_for_few_rows_of_its_own_types_only(monkeypatch):
    few = linear.FewRowsInt8(torch.randn(8, 48), torch.randn(8))
    calls = []
    monkeypatch.setattr(linear.Int8, "forward", lambda self, x: calls.append(x) or x)
    for rows in (1, MAX_ROWS, MAX_ROWS + 1):
        few(torch.zeros(rows, 48))
    assert [len(x) for x in calls] == [MAX_ROWS + 1]
    for dtype in (torch.float16, torch.bfloat16):  # its bias is float32
        few(torch.zeros(1, 48, dtype=dtype))
    assert len(calls) == 3


def test_our_own_kernel_leaves_out_what_its_sums_cannot_hold(monkeypatch):
    """255 x 127 for each input must stay below 2^31."""
    monkeypatch.setattr(linear, "multiplies_int8", lambda: True)
    longest = 1 << 16
    assert 255 * 127 * longest < 1 << 31
    for inputs, fits in ((longest, True), (longest + 64, False)):
        layer = linear.Int8(torch.ones(1, inputs), None)
        assert linear.FewRowsInt8.fits(layer) is fits


# e4m3, bit for bit.


def e4m3_grid(limit):
    """Returns every value up to `limit`, from the format's definition: 4 and 3 bits, bias 7."""
    values = {mantissa / 8 * 2.0**-6 for mantissa in range(8)}
    values |= {(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)}
    return sorted(v for v in values if v <= limit)


def reference_cast(value, limit):
    """Rounds one float: nearest value, of two equally near ones the even one; saturates."""
    if math.isnan(value):
        return value
    grid = e4m3_grid(limit)
    size = min(abs(value), limit)
    near = min(
        range(len(grid)),
        key=lambda i: (abs(grid[i] - size), i % 2),  # the place in the grid has the parity
    )
    return math.copysign(grid[near], value)


def awkward_values(limit):
    """All values, the middles between them, their neighbours, and what lies outside."""
    grid = torch.tensor(e4m3_grid(448.0), dtype=torch.float32)
    middles = (grid[1:] + grid[:-1]) / 2
    up, down = torch.tensor(math.inf), torch.tensor(-math.inf)
    points = torch.cat([grid, middles, torch.tensor([limit, 244.0, 248.0, 449.0, 1e9, math.inf])])
    points = torch.cat([points, torch.nextafter(points, up), torch.nextafter(points, down)])
    return torch.cat([points, -points, torch.tensor([math.nan])])


@pytest.mark.parametrize("limit", GENERATIONS.values(), ids=GENERATIONS)
def test_casts_equal_the_reference_bit_for_bit(limit):
    values = awkward_values(limit)
    got = fp8.cast(values, limit).float()
    want = torch.tensor([reference_cast(v, limit) for v in values.tolist()])
    assert torch.equal(got.isnan(), want.isnan())
    sound = ~got.isnan()
    assert torch.equal(got[sound], want[sound])
    assert torch.equal(got[sound].signbit(), want[sound].signbit())
    assert got[sound].abs().max() == limit


def test_gaudi_2_and_3_differ_where_they_must_and_nowhere_else():
    values = awkward_values(240.0)
    values = values[~values.isnan()]
    two, three = (fp8.cast(values, limit).float() for limit in GENERATIONS.values())
    assert torch.equal(two != three, values.abs() >= 248.0)  # half way, and 256 is the even one
    assert torch.equal(two[two != three].abs().unique(), torch.tensor([240.0]))


@pytest.mark.parametrize("generation", GENERATIONS)
def test_an_emulated_card_has_the_range_of_its_generation(generation):
    device = EmulatedHpuDevice(generation)
    assert device.fp8_limit == GENERATIONS[generation]
    config = SpecConfig(num_assistant_tokens=3, target_quant="fp8", draft_quant="fp8")
    config = config.replace(target_kv_dtype="fp8", draft_kv_dtype="fp8", bucket_size=32)
    running = SpeculativeEngine(toys.target(), toys.drafts()["noisy"], config, device)
    got = running.generate(toys.PROMPTS, NEW)
    alone = SpeculativeEngine(toys.target(), None, config.without_draft(), device)
    toys.assert_equal_rows(got, alone.generate(toys.PROMPTS, NEW))
    assert device.fallbacks() == 0
    found = layers(running.runtime.target.model)
    assert {layer.limit for layer in found} == {GENERATIONS[generation]}
    for layer in found:
        assert layer.codes.float().abs().max() <= GENERATIONS[generation]
        assert torch.equal(layer.scale, torch.exp2(layer.scale.log2().round()))


def test_generations_give_other_codes():
    torch.manual_seed(0)
    weight = torch.randn(32, 256)
    two, three = (linear.Fp8(weight, None, limit) for limit in GENERATIONS.values())
    assert not torch.equal(weights_of(two), weights_of(three))


# What is reported is what is loaded.


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("scheme", ("none", *SCHEMES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_what_scheme_and_sizes_predict(scheme, kv, dtype):
    """From a few integers alone: nothing of the loaded model is read for the prediction."""
    hidden, inner, heads, kv_heads, depth, vocab, slots = 256, 512, 4, 2, 2, 128, 64
    model = toys.build(
        "llama",
        vocab=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        num_hidden_layers=depth,
    ).to(dtype)
    settings = dict(target_quant=scheme, target_kv_dtype=kv, max_length=slots)
    running = engine(target=model, **settings)
    running.generate(toys.PROMPTS[:1], 2)
    found = running.facts()["target"]
    width, values = dtype.itemsize, hidden * kv_heads * (hidden // heads)
    numbers = depth * (2 * hidden * hidden + values + 3 * hidden * inner)  # without v_proj
    outputs = depth * (2 * hidden + values // hidden + 2 * inner + hidden)
    linear = {
        "none": numbers * width,
        "int8": numbers + 4 * outputs,
        "int8wo": numbers + 2 * outputs,
        "int4wo": numbers / 2 + numbers / 32 * 4,
        "fp8": numbers + 4 * outputs,
    }[scheme]
    norms = (2 * depth + 1) * hidden * width
    weights = linear + (depth * values + 2 * vocab * hidden) * width + norms
    assert sum(part["bytes"] for part in found["weights"]) == pytest.approx(weights, rel=0.02)
    stored = 2 * depth * slots * kv_heads
    number, scale = {"auto": (width, 0), "bf16": (2, 0)}.get(kv, (1, width))
    cache = stored * (hidden // heads * number + scale)
    assert found["kv_cache"]["bytes"] == pytest.approx(cache, rel=0.02)
    if scheme != "none":  # control: another scheme's bytes are not within 2 %
        assert linear != pytest.approx(numbers * width, rel=0.02)
        part = next(p for p in found["weights"] if p["scheme"] == scheme)
        assert part["weights"] == numbers and part["layers"] == 6 * depth
        assert part["bytes"] == pytest.approx(linear, rel=0.02)


def test_tied_weights_and_foreign_layers_are_counted_as_they_are():
    tied = parts(toys.target("llama-tied"))
    assert "head" not in {p.part for p in tied}
    total = sum(p.numel() * 4 for p in toys.target("llama-tied").parameters())
    assert 0 <= sum(p.bytes for p in tied) - total < 1000  # buffers of the rotary embedding
    model = copy.deepcopy(toys.target())
    model.model.layers[0].mlp.up_proj.weight.data = torch.zeros(1).to(torch.float8_e4m3fn)
    assert "Linear float8_e4m3fn" in {p.scheme for p in parts(model)}


# The caller's model.


def test_the_callers_model_is_left_alone():
    model = copy.deepcopy(toys.target())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kinds = [type(module) for module in model.modules()]
    engine(model, model, target_quant="int8", draft_quant="int4wo").generate(toys.PROMPTS, 4)
    assert [type(module) for module in model.modules()] == kinds
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_model_that_nobody_else_holds_can_be_quantized_in_place(scheme):
    """Its weights are freed; the text is the one of a model that is quantized beside them."""
    model = copy.deepcopy(toys.target())
    want = engine(target=model, target_quant=scheme).generate(toys.PROMPTS, NEW)
    device, quant = CpuDevice(), SpecConfig(target_quant=scheme).quant("target")
    weights = weakref.ref(model.model.layers[0].mlp.up_proj.weight)
    apply.replace(model, quant, "target", device)
    gc.collect()
    assert weights() is None
    running = engine(toys.drafts()["noisy"], target=model, target_quant=scheme)
    for prompt, ours, other in zip(toys.PROMPTS, running.generate(toys.PROMPTS, NEW), want):
        verdict = checker.explain(running.target_model, prompt, ours, other)
        assert verdict == "identical" or "a near-tie" in verdict, verdict
    other = next(s for s in SCHEMES if s != scheme)
    for wrong in (other, "none"):
        with pytest.raises(ConfigError, match=f"layers are {scheme} already"):
            engine(target=model, target_quant=wrong)
    assert all(a is b for a, b in zip(layers(model), layers(apply.quantize(model, quant, device))))


def test_weights_that_are_written_to_are_quantized_again():
    model = copy.deepcopy(toys.target())
    running = engine(target=model, target_quant="int8")
    first = running.generate(toys.PROMPTS, 8)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "mlp" in name:
                weight.neg_()
    again = running.generate(toys.PROMPTS, 8)
    toys.assert_equal_rows(
        again, engine(target=model, target_quant="int8").generate(toys.PROMPTS, 8)
    )
    assert any(not torch.equal(a, b) for a, b in zip(first, again))


def test_two_engines_share_one_quantized_copy():
    model = copy.deepcopy(toys.target())
    running = [engine(target=model, target_quant="int8") for _ in range(2)]
    for each in running:
        each.generate(toys.PROMPTS[:1], 2)
    codes = [layers(each.target_model)[0].codes.data_ptr() for each in running]
    assert codes[0] == codes[1]


def test_excluded_layers_keep_their_weights():
    names = lambda model: {n for n, m in model.named_modules() if isinstance(m, QuantLinear)}  # noqa: E731
    device = CpuDevice()

    def quantized(*exclude):
        config = SpecConfig(target_quant="int8", target_quant_exclude=exclude)
        return names(apply.quantize(shadow(toys.target()), config.quant("target"), device))

    assert {n.rpartition(".")[2] for n in quantized("nothing")} > {"lm_head", "v_proj"}
    default = names(
        apply.quantize(
            shadow(toys.build("qwen2-moe")), SpecConfig(target_quant="int8").quant("target"), device
        )
    )
    kept = ("lm_head", ".gate", "expert_gate", "v_proj")
    assert default and not any(n.endswith(kept) for n in default)
    some = quantized("layers.0.*", "o_proj")
    assert some and not any("layers.0." in n or n.endswith("o_proj") for n in some)
    running = engine(target=toys.target(), target_quant="int8", target_quant_exclude=["nothing"])
    alone = engine(toys.drafts()["noisy"], target_quant="int8", target_quant_exclude=["nothing"])
    toys.assert_equal_rows(alone.generate(toys.PROMPTS, NEW), running.generate(toys.PROMPTS, NEW))


# A draft that is broken, or of no use.


def test_broken_scales_cost_acceptance_and_are_told():
    """H4: the text is right, and the warning has the measured rate."""
    running = engine(copy.deepcopy(toys.target()), draft_quant="int8")
    running.generate(toys.PROMPTS[:1], 1)
    good = running.generate(toys.PROMPTS, 40)
    assert running.report.acceptance_rate > 0.7
    torch.manual_seed(0)
    for layer in layers(running.runtime.models["draft"].model):
        layer.scale.copy_(layer.scale * torch.randn_like(layer.scale) * 50)
    with pytest.warns(UserWarning, match="drafted tokens were accepted") as caught:
        bad = running.generate(toys.PROMPTS, 40)
    toys.assert_equal_rows(bad, good)
    toys.assert_equal_rows(bad, toys.references())
    rate = running.report.acceptance_rate
    assert rate < 0.05
    assert f"Only {rate:.1%} of {running.report.proposed} drafted" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        running.generate(toys.PROMPTS, 40)


def test_a_good_draft_is_not_warned_about():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine(toys.drafts()["noisy"], draft_quant="int8").generate(toys.PROMPTS, 40)


def test_a_quantized_copy_as_draft_tells_what_it_saves():
    """H5: a quantized copy is rarely much cheaper; the facts give the ratio of what is read."""
    running = engine(toys.drafts()["self"], draft_quant="int8")
    running.generate(toys.PROMPTS, NEW)
    sizes = {
        role: sum(p["bytes"] for p in values["weights"] if p["part"] in ("linear", "head"))
        for role, values in running.facts().items()
    }
    assert 0.25 < sizes["draft"] / sizes["target"] < 0.6
    assert running.report.mean_acceptance_length > 2


# Graphs.


def test_layers_and_caches_of_every_kind_compile_into_one_graph():
    """Without a graph break, and the graph computes the same."""
    torch.manual_seed(0)
    every = [kind(torch.randn(64, 64), torch.randn(64)) for kind in KINDS.values()]
    form = lambda name: kv_format(name, torch.float32, 448.0, False)  # noqa: E731
    caches = [SlotCache([(2, 32)], 1, 16, form(n), torch.device("cpu")) for n in ("int8", "fp8")]
    x, positions = torch.randn(1, 3, 64), torch.arange(3)[None]

    @torch.no_grad()
    def work():
        states = x.view(1, 3, 2, 32).transpose(1, 2)
        read = [k for c in caches for k in c.at(positions).update(states, states, 0)]
        return torch.cat([part.flatten() for part in (*read, *(layer(x) for layer in every))])

    want = work()
    for cache in caches:
        cache.zero()
    assert torch.allclose(torch.compile(work, fullgraph=True, dynamic=False)(), want, atol=1e-4)


@pytest.mark.slow
def test_quantized_models_compile_whole():
    """Weights and caches of both kinds in one graph, and the same text as without graphs."""
    config = SpecConfig(
        num_assistant_tokens=2,
        target_quant="int8",
        draft_quant="int4wo",
        target_kv_dtype="int8",
        draft_kv_dtype="fp8",
        prefill_chunks=(16,),
    )
    prompts = toys.PROMPTS[1:3]
    draft = toys.drafts()["noisy"]
    eager = SpeculativeEngine(toys.target(), draft, config).generate(prompts, 20)
    running = SpeculativeEngine(toys.target(), draft, config.replace(compile="graph"))
    for prompt, ours, other in zip(prompts, running.generate(prompts, 20), eager):
        verdict = checker.explain(running.target_model, prompt, ours, other)
        assert verdict == "identical" or "a near-tie" in verdict, verdict


@pytest.mark.cuda
@pytest.mark.parametrize("scheme", CudaDevice.quant_schemes)
def test_a_gpu_computes_what_a_cpu_does(scheme):
    torch.manual_seed(0)
    weight, x = torch.randn(64, 128).bfloat16(), torch.randn(5, 128).bfloat16()
    want = KINDS[scheme](weight, None)(x)
    got = KINDS[scheme](weight.cuda(), None)(x.cuda()).cpu()
    assert torch.allclose(got.float(), want.float(), atol=2e-2 * float(want.abs().max()))


# Flags and settings: each works or is refused by name.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(target_quant="int3"), "target_quant must be one of auto, none, int8"),
        (dict(draft_quant=8), "draft_quant must be one of"),
        (dict(target_kv_dtype="int4"), "target_kv_dtype must be one of auto, bf16, fp8, int8"),
        (dict(draft_quant_exclude="lm_head"), "draft_quant_exclude must be a list"),
        (dict(target_quant_exclude=[""]), "target_quant_exclude must be a list"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        SpecConfig(**settings)


def test_settings_survive_yaml(tmp_path):
    config = SpecConfig(target_quant="int8", draft_kv_dtype="fp8", draft_quant_exclude=("a", "b"))
    (tmp_path / "c.yaml").write_text(config.to_yaml())
    assert SpecConfig.from_yaml(tmp_path / "c.yaml") == config


def test_draft_settings_without_a_draft_are_refused():
    for name in ("draft_quant", "draft_kv_dtype"):
        with pytest.raises(ConfigError, match="need a draft model"):
            engine(**{name: "fp8"})


@pytest.mark.parametrize("scheme", ["auto", "none"])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_patterns_without_a_scheme_are_refused(role, scheme):
    asked = {f"{role}_quant": scheme, f"{role}_quant_exclude": ["lm_head"]}
    with pytest.raises(ConfigError, match=f"give {role}_quant too"):
        engine(toys.drafts()["noisy"], **asked)


def test_a_bias_that_was_replaced_counts():
    model = copy.deepcopy(toys.target("qwen2"))
    running = engine(target=model, target_quant="int8")
    before = running.generate(toys.PROMPTS, 8)
    attention = model.model.layers[0].self_attn
    attention.v_proj.bias = torch.nn.Parameter(torch.randn(attention.v_proj.bias.shape))
    want = engine(target=copy.deepcopy(model), target_quant="int8").generate(toys.PROMPTS, 8)
    assert any(not torch.equal(a, b) for a, b in zip(before, want))
    toys.assert_equal_rows(running.generate(toys.PROMPTS, 8), want)


def test_a_pattern_that_leaves_nothing_is_refused():
    with pytest.raises(ConfigError, match="fits no layer of the target"):
        engine(target_quant="int8", target_quant_exclude=["*"])
    odd = toys.build("llama", hidden_size=20, intermediate_size=44, num_attention_heads=2)
    with pytest.raises(ConfigError, match="fits no layer of the draft"):
        engine(odd, draft_quant="int4wo")


@pytest.mark.parametrize("scheme", ["int8", "int8wo", "int4wo"])
def test_schemes_without_a_kernel_on_the_card_are_refused(scheme):
    device = EmulatedHpuDevice()
    config = SpecConfig(target_quant=scheme)
    with pytest.raises(ConfigError, match=f"target_quant='{scheme}' has no kernel on hpu-emulated"):
        SpeculativeEngine(toys.target(), None, config, device)


def test_a_quantized_checkpoint_is_not_quantized_again():
    model = copy.deepcopy(toys.target())
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    for scheme in (*SCHEMES, "none"):
        with pytest.raises(ConfigError, match=r"quantized already \(gptq\)"):
            engine(target=model, target_quant=scheme)
    toys.assert_equal_rows(engine(target=model).generate(toys.PROMPTS, 4), expected(new=4))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return tiny_checkpoints.make(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture
def command(checkpoints, capsys):
    def run(*args, draft=True):
        models = ["--model_name_or_path", str(checkpoints[0])]
        models += ["--assistant_model", str(checkpoints[1])] if draft else []
        fast = ["-q", "--warmup", "0", "--n_iterations", "1", "--max_new_tokens", "8"]
        code = main(["generate", *models, *fast, "--prompt", tiny_checkpoints.words(9, 8), *args])
        return code, *capsys.readouterr()

    return run


def schemes_of(out):
    """Returns (weights of linear layers, cache) by role, from the JSON of the last line."""
    models = json.loads(out.splitlines()[-1])["models"]
    return {
        role: (
            next(p["scheme"] for p in values["weights"] if p["part"] == "linear"),
            values["kv_cache"]["scheme"],
        )
        for role, values in models.items()
    }


@pytest.mark.parametrize("role", ["target", "draft"])
def test_one_flag_quantizes_one_model(command, role):
    """H2: nothing is inherited, and what is printed is what was loaded."""
    code, out, _ = command(f"--{role}_quant", "int8")
    assert code == 0
    found = schemes_of(out)
    other = "draft" if role == "target" else "target"
    assert found[role] == ("int8", "float32") and found[other] == ("float32", "float32")
    assert f"{role.capitalize()} linear" in out and "= int8, " in out


@pytest.mark.parametrize(
    ("target_kv", "draft_kv"),
    [("bf16", "fp8"), ("auto", "int8"), ("fp8", "auto"), ("int8", "bf16")],
)
def test_cache_flags_are_independent(command, target_kv, draft_kv):
    """H7 on the command line."""
    code, out, _ = command("--target_kv_dtype", target_kv, "--draft_kv_dtype", draft_kv)
    names = {"auto": "float32", "bf16": "bfloat16"}
    found = schemes_of(out)
    assert code == 0
    assert found["target"][1] == names.get(target_kv, target_kv)
    assert found["draft"][1] == names.get(draft_kv, draft_kv)


@pytest.mark.parametrize(
    ("target", "draft"), [*zip(QUANT_SCHEMES, QUANT_SCHEMES[::-1]), ("int8", "int8")]
)
def test_pairs_of_schemes_work(command, target, draft):
    code, out, err = command(
        "--target_quant", target, "--draft_quant", draft, "--compare_baseline", "--bf16"
    )
    assert code == 0, err
    assert "NOT a near-tie" not in out
    plain = {"auto": "bfloat16", "none": "bfloat16"}
    assert schemes_of(out)["target"][0] == plain.get(target, target)
    assert schemes_of(out)["draft"][0] == plain.get(draft, draft)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--draft_quant", "int8"], "need a draft model"),
        (["--draft_kv_dtype", "int8"], "need a draft model"),
        (["--draft_quant_exclude", "x"], "need a draft model"),
        (["--target_quant", "int8", "--device", "hpu-emulated"], "no kernel on hpu-emulated"),
    ],
)
def test_flags_that_cannot_be_honoured_are_refused(command, args, message):
    code, _, err = command(*args, draft=False)
    assert code == 2 and message in err
