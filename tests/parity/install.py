"""Install mamba-ssm's Triton kernels on a machine without a GPU, into a folder of their own.

In: tests/parity/requirements.txt. Out: FOLDER/site, to be put on PYTHONPATH in front of the running
environment, whose packages stay as constraints.txt pins them. Run by `make parity`:
python -m tests.parity.install FOLDER

mamba-ssm has only a source distribution, and its build asks `torch.version.cuda`, which a CPU build of torch
leaves at None. For the length of that one build a `sitecustomize` module names a CUDA version; no CUDA code is
compiled, because the kernels compared are Triton's and come as Python files. causal-conv1d is CUDA only and
not needed.
"""

import os
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
BUILD_TOOLS = ("ninja==1.13.2", "wheel==0.48.0")
PRETEND_CUDA = 'import torch\n\nif torch.version.cuda is None:\n    torch.version.cuda = "12.8"\n'


def main(folder: Path) -> None:
    """Fill `folder`/site; where pip fails, its own output says why (subprocess.CalledProcessError)."""
    tools, site, trick = folder / "tools", folder / "site", folder / "trick"
    trick.mkdir(parents=True, exist_ok=True)
    (trick / "sitecustomize.py").write_text(PRETEND_CUDA, encoding="utf-8")
    pip_install(["--target", str(tools), "--no-deps", *BUILD_TOOLS], {})
    build = {
        "PYTHONPATH": os.pathsep.join(str(path.resolve()) for path in (trick, tools)),
        "MAMBA_SKIP_CUDA_BUILD": "TRUE",
        "MAMBA_FORCE_BUILD": "TRUE",
    }
    pip_install(["--target", str(site), "--no-deps", "--no-build-isolation", "-r", str(REQUIREMENTS)], build)


def pip_install(arguments: list[str], environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--disable-pip-version-check"]
    subprocess.run([*command, *arguments], env={**os.environ, **environment}, check=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.parity.install FOLDER")
    main(Path(sys.argv[1]))
