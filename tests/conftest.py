"""Shared settings: one thread, quiet Transformers, no engine kept from test to test."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hypothesis
import pytest
import torch
import transformers

import gaudi_spec

sys.path.insert(0, str(Path(__file__).parent))  # `import toys`, whatever the import mode
# These want a process of their own, see test_optimum_habana.py.
collect_ignore = [] if os.environ.get("GAUDI_SPEC_ADAPTED") else ["adapted"]
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("tests")


@pytest.fixture(autouse=True)
def _release_engines():
    """Frees the engines that `gaudi_spec.generate` keeps."""
    yield
    gaudi_spec.release()
