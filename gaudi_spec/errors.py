"""Every error a user can meet: one clear sentence with the remedy, and the exit code it maps to."""

from __future__ import annotations


class GaudiSpecError(Exception):
    """Base of all errors raised on purpose by this package; `exit_code` is the command line's."""

    exit_code = 1


class ConfigError(GaudiSpecError, ValueError):
    """A setting is out of range, unknown, or contradicts another one."""

    exit_code = 2


class UnsupportedOptionError(ConfigError):
    """An option of `generate` that this package cannot honour; the message names it."""


class UnsupportedModelError(ConfigError):
    """A model whose state cannot be kept in slots and rolled back by position."""


class InputError(ConfigError):
    """A prompt, a mask or a token budget that cannot be served."""


class CheckpointError(GaudiSpecError, OSError):
    """A model directory that is incomplete, damaged or in a format that is not loaded."""


class NumericalError(GaudiSpecError, ArithmeticError):
    """The target produced logits that are NaN or infinite."""


class ShapeError(GaudiSpecError, RuntimeError):
    """A shape that the warm-up did not build is needed, in strict mode."""


class CaptureError(GaudiSpecError, RuntimeError):
    """Work that a device cannot capture, such as a host read inside a graph."""
