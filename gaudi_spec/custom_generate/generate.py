"""What `model.generate(custom_generate=gaudi_spec.custom_generate_path())` runs."""

from gaudi_spec import generate  # noqa: F401
