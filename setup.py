"""Packages and dependencies of Slipstream. The reason for each dependency is in docs/dependencies.md."""

import re
from pathlib import Path

from setuptools import find_packages, setup

PACKAGES = ("allocation", "model_specs", "tracing", "rollout", "mcore_adapter", "core", "tools", "slipstream")
VERSION = re.search(r'^__version__ = "(.+)"', Path("slipstream/__init__.py").read_text(encoding="utf-8"), re.MULTILINE)

DEPENDENCIES = [
    "torch>=2.11,<=2.13.0",
    "megatron-core==0.16.1",
    "ray==2.60.0",
    "transformers>=5.12.1,<=5.17.0",
    "tokenizers>=0.22,<0.24",
    "safetensors>=0.6,<0.9",
    "numpy>=1.26,<3",
    "psutil>=6,<8",
    "pydantic>=2.10,<3",
    "PyYAML>=6.0.2,<7",
    "math-verify[antlr4-13-2]==0.9.0",
    "rich>=13,<16",
    "tensorboard>=2.19,<3",
    "matplotlib>=3.9,<4",
    "aiohttp>=3.10,<4",
    "orjson>=3.10,<4",
    "pyarrow>=17,<27",
    "datasets>=4,<6",
]

EXTRAS = {
    "gpu": [
        "torch==2.11.0",
        "triton>=3.6,<4",
        "sglang==0.5.17",
        "transformer-engine[core_cu13,pytorch]==2.10.0",
    ],
    "dev": [
        "pytest>=8.3,<10",
        "pytest-timeout>=2.3,<3",
        "pytest-xdist>=3.6,<4",
        "hypothesis>=6.100,<7",
        "scipy>=1.14,<2",
        "ruff==0.17.5",
        "mypy==2.4.1",
        "cosmic-ray==8.7.0",
        "types-PyYAML>=6,<7",
        "types-psutil>=6,<8",
        "wandb>=0.19,<1",
        "mlflow-skinny>=3,<4",
    ],
    "wandb": ["wandb>=0.19,<1"],
    "mlflow": ["mlflow-skinny>=3,<4"],
}

setup(
    name="slipstream",
    version=VERSION.group(1),
    description="Asynchronous reinforcement learning of language models on Megatron-core",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    package_data={"slipstream": ["py.typed"]},
    entry_points={"console_scripts": ["slipstream = slipstream.cli:main"]},
    packages=find_packages(include=[name + suffix for name in PACKAGES for suffix in ("", ".*")]),
    install_requires=DEPENDENCIES,
    extras_require=EXTRAS,
)
