"""Packaging: all metadata is here; pyproject.toml holds only the tools' tables."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def version() -> str:
    """Reads the version without importing the package."""
    text = (ROOT / "gaudi_spec" / "version.py").read_text(encoding="utf-8")
    return re.search(r'__version__ = "([^"]+)"', text).group(1)


def long_description() -> str:
    """Returns the README, or nothing where it is missing."""
    readme = ROOT / "README.md"
    return readme.read_text(encoding="utf-8") if readme.is_file() else ""


EXTRAS = {
    # The second spares pip 23 from trying 70 releases of what Optimum Habana leaves open.
    "habana": ["optimum-habana==1.21.2", "huggingface-hub[hf_xet]<1"],
    "deepspeed": ["deepspeed"],
    "quant": ["neural-compressor-pt"],
    "bench": ["matplotlib"],
    "audio": ["soundfile"],
    "eval": ["lm_eval"],
    "demo": ["gguf", "accelerate"],
}
EXTRAS["test"] = ["pytest", "hypothesis", *EXTRAS["bench"], *EXTRAS["demo"]]
EXTRAS["dev"] = ["ruff==0.17.6", "mypy==2.4.1", "types-PyYAML", "types-tqdm"]
EXTRAS["dev"] += [*EXTRAS["habana"], *EXTRAS["test"]]  # it pins Transformers, so not in "test"
EXTRAS["all"] = sorted({requirement for group in EXTRAS.values() for requirement in group})

setup(
    name="gaudi-spec",
    version=version(),
    description="Exact speculative decoding of Hugging Face models over static shapes, for Gaudi",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10,<3.14",
    packages=find_packages(include=["gaudi_spec", "gaudi_spec.*"]),
    package_data={
        "gaudi_spec": [
            "py.typed",
            "custom_generate/generate.py",
            "device/linear.c",
            "distill/prompts.txt",
            "packaged/*/*",
            "plan/*.yaml",
            "quant/sample.txt",
        ]
    },
    install_requires=[
        "torch",
        "transformers>=4.55",
        "numpy",
        "pyyaml",
        "tqdm",
        "safetensors",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["gaudi-spec = gaudi_spec.cli:main"]},
    keywords=["speculative decoding", "Gaudi", "HPU", "Transformers", "inference"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
