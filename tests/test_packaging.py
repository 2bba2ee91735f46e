"""The folders at the top are one package, and `kernels/` never stands in the way of Hugging Face's own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("allocators", "evaluation", "kernels", "presses", "scorers", "views")
USES_A_MODEL = """
import transformers
from transformers import LlamaConfig, LlamaForCausalLM
LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1))
"""


def run_in_root(code: str, *path: Path) -> subprocess.CompletedProcess:
    """A fresh Python started in the root of the repository, which is then first on `sys.path`."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )


def test_kernels_is_no_regular_package():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    for folder in (ROOT / "kernels").iterdir():
        if folder.is_dir() and any(folder.glob("*.py")):
            assert (folder / "__init__.py").exists(), folder.name


def test_models_import_in_the_root_without_the_real_kernels_package():
    result = run_in_root(USES_A_MODEL + "import kvstitch.presses")
    assert result.returncode == 0, result.stderr


def test_a_real_kernels_package_is_found_before_our_folder(tmp_path):
    """A stand-in for the real package, later on the path than the root, still wins over our namespace folder."""
    package = tmp_path / "kernels"
    package.mkdir()
    names = "get_kernel Device LayerRepository Mode register_kernel_mapping replace_kernel_forward_from_hub kernelize CUDAProperties"
    package.joinpath("__init__.py").write_text(
        "__version__ = '0.12.0'\nSTAND_IN = True\n"
        + "\n".join(f"{name} = lambda *args, **kwargs: (lambda layer: layer)" for name in names.split())
    )
    result = run_in_root(f"import sys; sys.path.append({str(tmp_path)!r})\nimport kernels\nassert kernels.STAND_IN\n")
    assert result.returncode == 0, result.stderr
    result = run_in_root(
        f"import sys; sys.path.append({str(tmp_path)!r})\n" + USES_A_MODEL + "import kernels\nassert kernels.STAND_IN\n"
        "import kvstitch.presses, kvstitch.kernels.window_attention.api\n"
    )
    assert result.returncode == 0, result.stderr


def test_every_folder_with_code_is_packaged():
    tomllib = pytest.importorskip("tomllib", reason="reading pyproject.toml needs Python 3.11")
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    for top in FOLDERS:
        for init in (ROOT / top).rglob("__init__.py"):
            name = "kvstitch." + ".".join(init.parent.relative_to(ROOT).parts)
            assert name in listed, f"{name} is missing from [tool.setuptools] packages"


@pytest.mark.parametrize("package", ["scorers", "allocators", "kernels", "views"])
def test_arrows_point_one_way(package):
    """scripts -> evaluation -> presses -> {scorers, allocators} -> views -> kernels."""
    allowed = {
        "kernels": {"kernels"},
        "views": {"views", "kernels"},
        "scorers": {"scorers", "views", "kernels"},
        "allocators": {"allocators", "views", "kernels"},
    }[package]
    for source in (ROOT / package).rglob("*.py"):
        for line in source.read_text().splitlines():
            words = line.split()
            if len(words) > 1 and words[0] in ("from", "import") and words[1].startswith("kvstitch."):
                assert words[1].split(".")[1] in allowed, f"{source.relative_to(ROOT)}: {line}"
            if package != "scorers" and len(words) > 1 and words[0] in ("from", "import"):
                assert words[1].split(".")[0] not in ("transformers", "hydra", "kvpress"), f"{source}: {line}"
