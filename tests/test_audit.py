"""The audit counts, finds what is planted, and ends with 1 if the contract is broken."""

import json

import pytest
import tiny_checkpoints
import torch
import toys

from gaudi_spec import SpecConfig, cli
from gaudi_spec.audit import Audit, audit, baseline_shapes, workload
from gaudi_spec.device import get_device
from gaudi_spec.loading import Pair

WORK = workload(9, toys.VOCAB, 64)
EAGER = SpecConfig(compile="eager", prefill_chunks=(16,))


def run(pair: Pair, **changes) -> Audit:
    config = EAGER.replace(**changes)
    return audit(pair, get_device("cpu"), config, [1, 4], [2, 3], WORK, quiet=True)


@pytest.fixture
def pair():
    return Pair(toys.target(), toys.drafts()["noisy"], None)


def test_a_good_pair_keeps_the_contract(pair):
    found = run(pair)
    assert not found.broken
    assert found.recipes_after_warmup == found.reallocations == found.fallback_ops == 0
    assert found.host_reads_per_cycle == 1
    assert all(count <= 8 for count in found.recipes.values()) and len(found.recipes) == 4


@pytest.mark.parametrize("schedule", ["auto", "heuristic", "confidence"])
def test_every_k_of_a_schedule_keeps_the_contract(pair, schedule):
    """All are built in the warm-up; only confidence reads once more."""
    found = run(pair, schedule=schedule)
    assert not found.broken and found.recipes_after_warmup == 0
    assert found.reads_allowed == (2 if schedule == "confidence" else 1)
    assert 1 <= found.host_reads_per_cycle <= found.reads_allowed


def test_fewer_host_reads_are_counted(pair):
    assert run(pair, sync_every=3).host_reads_per_cycle < 0.9


def test_planted_faults_are_counted(pair, monkeypatch):
    """A shape that the warm-up left out; a buffer that moves."""
    from gaudi_spec import runtime

    jobs = runtime.Runtime._jobs
    monkeypatch.setattr(runtime.Runtime, "_jobs", lambda self, sizes: list(jobs(self, sizes))[:-1])
    with pytest.warns(UserWarning, match="not built in the warm-up"):
        assert run(pair).broken == ["recipes_after_warmup"]
    monkeypatch.undo()

    fill = runtime.Runtime.prefill

    def moving(self, *given):
        self.target.cache.keys[0] = self.target.cache.keys[0].clone()
        fill(self, *given)

    monkeypatch.setattr(runtime.Runtime, "prefill", moving)
    assert run(pair).broken == ["reallocations"]


def test_transformers_makes_many_more_shapes(pair):
    """One for almost every call, where ours has a handful."""
    assert baseline_shapes(pair, WORK, 3) > 5 * max(run(pair).recipes.values())


def test_the_workload_is_mixed():
    lengths = {len(prompt) for prompt in WORK.prompts}
    assert (
        len(lengths) > 3
        and len(set(WORK.budgets)) > 3
        and {len(e) > 0 for e in WORK.ends}
        == {
            True,
            False,
        }
    )
    assert WORK.longest <= 64 and all(torch.is_tensor(p) for p in WORK.prompts)


@pytest.mark.parametrize("args", [["--prompts", "0"], ["--room", "31"], ["--prompts", "-1"]])
def test_an_audit_of_nothing_is_refused(capsys, args):
    assert cli.main(["audit", "--model", "a", "--assistant_model", "b", *args]) == 2
    assert f"{args[0]} must be at least" in capsys.readouterr().err


def test_a_quantized_pair_is_audited_as_such(tmp_path, capsys, monkeypatch):
    """And a scheme that the device lacks is refused."""
    seen = []
    monkeypatch.setattr(
        "gaudi_spec.audit.audit", lambda pair, device, config, *_: seen.append(config) or Audit()
    )
    target, draft = tiny_checkpoints.make(tmp_path)
    arguments = ["audit", "--model", str(target), "--assistant_model", str(draft), "-q"]
    flags = ["--target_quant", "fp8", "--draft_kv_dtype", "fp8", "--target_kv_dtype", "fp8"]
    assert cli.main([*arguments, "--no_baseline", *flags]) == 0
    assert (seen[0].target_quant, seen[0].draft_quant) == ("fp8", "auto")
    assert seen[0].target_kv_dtype == seen[0].draft_kv_dtype == "fp8"
    assert cli.main([*arguments, "--target_quant", "int9"]) == 2


def test_the_command_prints_json_and_its_verdict(tmp_path, capsys):
    """Exit 0 and the documented keys."""
    target, draft = tiny_checkpoints.make(tmp_path)
    arguments = ["audit", "--model", str(target), "--assistant_model", str(draft), "-q"]
    arguments += ["--batch_sizes", "1,2", "--num_assistant_tokens", "2"]
    assert cli.main([*arguments, "--prompts", "6", "--room", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "contract kept" in lines and lines[0].startswith("EMULATED")
    assert set(json.loads(lines[-1])) >= {
        "recipes_warmup",
        "recipes_after_warmup",
        "host_reads_per_cycle",
        "fallback_ops",
        "reallocations",
        "baseline_distinct_shapes",
    }
