"""The pure functions: verification, ladders, masks, settings."""

from __future__ import annotations

import itertools

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gaudi_spec import ConfigError, SpecConfig
from gaudi_spec.buckets import chunks, round_up
from gaudi_spec.masks import attention_bias
from gaudi_spec.verify import greedy


@st.composite
def verifications(draw):
    """Draws drafted `[B][K]`, chosen `[B][K+1]` and n_proposed `[B]` over a small vocabulary."""
    rows, k = draw(st.integers(1, 4)), draw(st.integers(0, 6))
    token = st.integers(0, 2)
    table = lambda width: st.lists(  # noqa: E731
        st.lists(token, min_size=width, max_size=width), min_size=rows, max_size=rows
    )
    counts = draw(st.lists(st.integers(0, k), min_size=rows, max_size=rows))
    return draw(table(k)), draw(table(k + 1)), counts


def scalar_greedy(drafted, chosen, n_proposed):
    """Returns how many drafted tokens one row accepts, in plain Python."""
    accepted = 0
    while accepted < n_proposed and drafted[accepted] == chosen[accepted]:
        accepted += 1
    return accepted


@given(verifications())
def test_greedy_verification_equals_a_scalar_reference(case):
    """In every row, whatever the other rows do; the tokens are the target's own choice."""
    drafted, chosen, counts = case
    shaped = torch.tensor(drafted, dtype=torch.long).reshape(len(drafted), -1)
    verdict = greedy(shaped, torch.tensor(chosen), torch.tensor(counts))
    want = [scalar_greedy(*row) for row in zip(drafted, chosen, counts)]
    assert verdict.n_accepted.tolist() == want
    assert verdict.tokens.tolist() == chosen


_ladders = st.lists(st.integers(1, 400), min_size=1, max_size=5, unique=True).map(sorted)


@given(st.integers(0, 3000), _ladders, st.integers(0, 500))
def test_chunks_cover_and_pad_at_most_one(count, ladder, free):
    """Widths come from the ladder; without the last one something is left to cover."""
    widths = chunks(count, ladder, free)
    assert set(widths) <= set(ladder)
    assert sum(widths) >= count
    assert sum(widths[:-1]) < count or (not count and not widths)


@given(st.integers(1, 3000), _ladders, st.integers(0, 500))
def test_chunks_are_no_slower_than_one_or_than_the_widest_that_fit(count, ladder, free):
    """Neither padding to one wide chunk nor never padding is right for every device."""

    def cost(widths):
        return sum(widths) + free * len(widths)

    one = [[width] for width in ladder if width >= count][:1]
    tight, left = [], count
    while left > 0:
        tight.append(max((w for w in ladder if w <= left), default=ladder[0]))
        left -= tight[-1]
    assert cost(chunks(count, ladder, free)) <= min(map(cost, [*one, tight]))


def test_a_device_with_time_to_spare_takes_one_chunk():
    """130 tokens: little is padded where tokens cost time, one chunk is run where chunks do."""
    assert chunks(130, (16, 64, 256), 0) == [64, 64, 16]
    assert chunks(130, (16, 64, 256), 256) == [256]


@given(st.integers(0, 10**6), st.integers(1, 5000))
def test_round_up_is_the_smallest_multiple(value, multiple):
    """At least the value, less than one multiple above it."""
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0 and 0 <= rounded - value < multiple


@given(
    st.lists(st.lists(st.integers(0, 14), min_size=3, max_size=3), min_size=1, max_size=3),
    st.integers(1, 16),
    st.one_of(st.none(), st.integers(1, 20)),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_attention_bias_equals_a_brute_force_mask(positions, slots, window, dtype):
    """Slot j is seen from position p iff j <= p and, with a window w, p - j < w."""
    bias = attention_bias(torch.tensor(positions), torch.arange(slots), window, dtype)
    assert bias.shape == (len(positions), 1, 3, slots) and bias.dtype == dtype
    for b, t, j in itertools.product(range(len(positions)), range(3), range(slots)):
        p = positions[b][t]
        seen = j <= p and (window is None or p - j < window)
        assert bias[b, 0, t, j] == (0 if seen else torch.finfo(dtype).min)


configs = st.builds(
    SpecConfig,
    num_assistant_tokens=st.integers(1, 32),
    batch_size=st.none() | st.integers(1, 64),
    max_length=st.none() | st.integers(2, 10**6),
    length_multiple=st.integers(1, 4096),
    prefill_chunks=st.lists(st.integers(1, 4096), min_size=1, max_size=6, unique=True).map(
        lambda widths: tuple(sorted(widths))
    ),
    allow_untested_models=st.booleans(),
)


@given(configs)
def test_config_survives_yaml(config):
    """Out and in again is equal, hash included: engines are kept by it."""
    again = SpecConfig.from_dict(yaml.safe_load(config.to_yaml()))
    assert again == config and hash(again) == hash(config)


def test_config_survives_a_yaml_file(tmp_path):
    """An empty file is the default."""
    config = SpecConfig(num_assistant_tokens=7, prefill_chunks=[8, 32])
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    assert SpecConfig.from_yaml(path) == config
    path.write_text("")
    assert SpecConfig.from_yaml(path) == SpecConfig()


@pytest.mark.parametrize(
    "text", ["a: [", "- 1\n- 2", "just words", "num_assistant_token: 3", None], ids=str
)
def test_bad_yaml_file_is_a_config_error(tmp_path, text):
    """Not YAML, not a mapping, an unknown key, or no file at all."""
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError):
        SpecConfig.from_yaml(path)


def test_unknown_key_names_the_nearest():
    """So that a typing error is found at once."""
    with pytest.raises(ConfigError, match=r"'num_asistant_tokens'.*'num_assistant_tokens'"):
        SpecConfig.from_dict({"num_asistant_tokens": 3})
    with pytest.raises(ConfigError, match="known: num_assistant_tokens"):
        SpecConfig.from_dict({"zzz": 3})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("num_assistant_tokens", v) for v in (0, -1, 33, 2.0, "5", True)),
        *(("batch_size", v) for v in (0, -2, 1.5, "2", True)),
        *(("max_length", v) for v in (1, 0, 2.5, "64", True)),
        *(("length_multiple", v) for v in (0, None, 1.5)),
        *(("prefill_chunks", v) for v in ((), (0, 4), (4, 4), (8, 4), (4, 8.0), 16, "16", None)),
        *(("prefill_chunks", v) for v in ((True, 4), ["4"])),
        *(("allow_untested_models", v) for v in (1, "yes", None)),
    ],
)
def test_bad_setting_is_a_config_error_that_names_it(name, value):
    """At construction, in `replace`, and from plain values."""
    with pytest.raises(ConfigError, match=name):
        SpecConfig(**{name: value})
    with pytest.raises(ConfigError, match=name):
        SpecConfig().replace(**{name: value})
    with pytest.raises(ConfigError, match=name):
        SpecConfig.from_dict({name: value})
