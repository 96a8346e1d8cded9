"""Everything here runs in a process that Optimum Habana has adapted, over the emulator."""

from __future__ import annotations

import contextlib
import io

import transformers

from gaudi_spec.device.emulated import EmulatedHpuDevice

EmulatedHpuDevice()
with contextlib.redirect_stdout(io.StringIO()):  # it prints which kernels it does without
    from optimum.habana.transformers.modeling_utils import adapt_transformers_to_gaudi

    adapt_transformers_to_gaudi()
transformers.logging.set_verbosity_error()
