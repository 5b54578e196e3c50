"""The package as a user gets it: a wheel, installed and used outside the repository; and what the documents promise."""

import importlib.metadata
import importlib.util
import json
import os
import re
import stat
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"mla_kernels": ROOT / "kernels" / "mla_kernels", "mla_torch": ROOT / "mla_torch", "mla_jax": ROOT / "mla_jax"}
FRAMEWORKS = {"mla_torch": "torch", "mla_jax": "jax"}
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
MAX_LINES = 400


def need(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")


def environment(**extra: str) -> dict[str, str]:
    """A user's environment on a CPU: no path into the repository, nothing interpreted."""
    ours = ("PYTHONPATH", "TRITON_INTERPRET", "TRITON_CACHE_DIR", "JAX_DISABLE_MOST_OPTIMIZATIONS")
    env = {k: v for k, v in os.environ.items() if k not in ours}
    return {**env, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", **extra}


def run(command: list[str], cwd: Path, **extra: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=environment(**extra), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], ROOT)
    (found,) = folder.glob("mla_decode-*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment that has the wheel, and this environment's other packages.

    A path file lends it our site-packages.  Path files found there are not followed, so an editable install is not seen.
    """
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], folder)
    (site,) = (folder / "lib").glob("python3.*/site-packages")
    lent = [path for path in sys.path if path.endswith("site-packages")]
    (site / "lent.pth").write_text("\n".join(lent) + "\n")
    return python


def user_code(installed: Path, code: str, **extra: str) -> str:
    return run([str(installed), "-c", code], installed.parent, **extra)


def test_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    info = {name for name in top if name.endswith(".dist-info")}
    assert top - info == set(PACKAGES)
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    for package, folder in PACKAGES.items():
        sources = {f"{package}/{path.relative_to(folder)}" for path in folder.rglob("*.py")}
        assert sources <= set(names)


def test_wheel_is_what_runs_and_brings_no_module_named_kernels(installed: Path) -> None:
    code = (
        "import importlib.util as u, json, sys\n"
        f"print(json.dumps([u.find_spec(n) and u.find_spec(n).origin for n in {[*PACKAGES, 'kernels']}]))"
    )
    *origins, kernels = json.loads(user_code(installed, code))
    assert kernels is None or "mla_decode" not in kernels
    for origin in origins:
        assert Path(origin).is_relative_to(installed.parent.parent), origin


def test_requirements_of_the_wheel_are_met(installed: Path) -> None:
    extras = [extra for extra, module in (("torch", "torch"), ("jax", "jax")) if importlib.util.find_spec(module)]
    code = "import importlib.metadata as m, json; print(json.dumps(m.requires('mla-decode')))"
    requirements = [Requirement(line) for line in json.loads(user_code(installed, code))]
    seen = set()
    for requirement in requirements:
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            version = importlib.metadata.version(requirement.name)
            assert requirement.specifier.contains(version, prereleases=True), f"{requirement}: {version} is installed"
            seen.add(requirement.name)
    assert {"triton", "numpy"} <= seen
    assert ("jax-triton" in seen) == ("jax" in extras)


@pytest.mark.parametrize(
    ("package", "foreign"), [("mla_kernels", ("torch", "jax")), ("mla_torch", ("jax", "transformers")), ("mla_jax", ("torch",))]
)
def test_import_brings_no_other_framework(installed: Path, package: str, foreign: tuple[str, ...]) -> None:
    need(FRAMEWORKS.get(package, "triton"))
    code = f"import importlib, json, pkgutil, sys\npackage = importlib.import_module({package!r})\n"
    if package == "mla_kernels":  # an empty module itself: what counts is behind it
        code += "for m in pkgutil.walk_packages(package.__path__, 'mla_kernels.'): importlib.import_module(m.name)\n"
    code += "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    modules = json.loads(user_code(installed, code))
    assert package in modules
    assert not set(foreign) & set(modules)


@pytest.mark.parametrize("package", FRAMEWORKS)
def test_missing_framework_is_one_clear_sentence(installed: Path, package: str) -> None:
    framework = FRAMEWORKS[package]
    code = f"""
import sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {framework!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hide())
try:
    import {package}
except ImportError as error:
    print(error)
"""
    (message,) = user_code(installed, code).splitlines()
    assert package in message
    assert f"mla-decode[{framework}]" in message


@pytest.mark.parametrize("before", [None, "", "set"])
def test_jax_triton_leaves_the_cache_folder_of_triton_alone(installed: Path, tmp_path: Path, before: str | None) -> None:
    need("jax")
    value = None if before is None else before and str(tmp_path)
    extra = {} if value is None else {"TRITON_CACHE_DIR": value}
    code = (
        "import json, os, sys\nimport mla_jax\nfrom mla_jax import jax_triton_compat\njax_triton_compat.available()\n"
        "print(json.dumps(['jax_triton' in sys.modules, os.environ.get('TRITON_CACHE_DIR')]))"
    )
    imported, after = json.loads(user_code(installed, code, **extra))
    assert imported == (importlib.util.find_spec("jax_triton") is not None)
    assert after == value


DENSE_STEP = """
import numpy as np

rng = np.random.default_rng(0)
lengths = np.array([5, 9, 0], np.int32)
q = rng.standard_normal((3, 1, 4, 576), dtype=np.float32)
cache = rng.standard_normal((6, 4, 1, 576), dtype=np.float32)
table = np.array([[3, 1, -1], [0, 2, 5], [-1, -1, -1]], np.int32)
{convert}
q, cache = bf16(q), bf16(cache)
out, lse = decode(q, cache, array(table), array(lengths))
q, cache, out, lse = (np.asarray({widen}, np.float64) for x in (q, cache, out, lse))
for i, n in enumerate(lengths):
    rows = cache[table[i], :, 0].reshape(-1, 576)[:n]
    scores = q[i, 0] @ rows.T / 24
    if n == 0:
        assert (out[i] == 0).all() and (lse[i] == np.inf).all()
        continue
    weights = np.exp(scores)
    want = weights @ rows[:, :512] / weights.sum(-1, keepdims=True)
    assert np.abs(out[i, 0] - want).max() < 2**-8 * np.abs(want).max() + 1e-6, np.abs(out[i, 0] - want).max()
    assert np.abs(lse[i, :, 0] - np.log(weights.sum(-1))).max() < 1e-4
print("decoded by", decode.__module__)
"""
CONVERT = {
    "mla_torch": (
        "import torch\nfrom mla_torch import decode\narray = torch.from_numpy\nbf16 = lambda x: array(x).bfloat16()",
        "x.float()",
    ),
    "mla_jax": (
        "import jax.numpy as jnp\nfrom mla_jax import decode\narray = jnp.asarray\nbf16 = lambda x: array(x, jnp.bfloat16)",
        "x.astype(jnp.float32)",
    ),
}


@pytest.mark.parametrize("interpret", ["0", "1"])
@pytest.mark.parametrize("package", FRAMEWORKS)
def test_installed_wheel_decodes(installed: Path, package: str, interpret: str) -> None:
    need(FRAMEWORKS[package])
    convert, widen = CONVERT[package]
    code = DENSE_STEP.format(convert=convert, widen=widen)
    assert f"decoded by {package}" in user_code(installed, code, TRITON_INTERPRET=interpret)


def python_blocks(document: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / document).read_text(), re.DOTALL | re.MULTILINE)


def test_readme_has_a_call_for_each_framework() -> None:
    text = "\n".join(python_blocks("README.md"))
    assert "mla_torch.decode(" in text
    assert "mla_jax.decode" in text


@pytest.mark.parametrize("number", range(len(python_blocks("README.md"))))
def test_readme_code_runs(installed: Path, number: int) -> None:
    code = python_blocks("README.md")[number]
    for package, framework in FRAMEWORKS.items():
        if package in code:
            need(framework)
    if "transformers" in code:
        need("transformers")
    user_code(installed, code)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_name_targets_and_files_that_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    code = "\n".join(re.findall(r"`+([^`]+)`+", text))
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"^make ([a-z][a-z-]*)", code, re.MULTILINE))
    assert named <= targets, f"{document} names targets that the Makefile lacks: {named - targets}"
    files = set(re.findall(r"\b(?:kernels|mla_torch|mla_jax|tests|tools|constraints|examples)/[\w/.-]*\w", code))
    files |= set(re.findall(r"\]\(([^)#:]+)\)", text))
    assert not [name for name in files if not (ROOT / name).exists()]
    modules = re.findall(r"python -m (benchmarks[\w.]*)", code)
    assert not [name for name in modules if not (ROOT / f"{name.replace('.', '/')}.py").exists()]


def test_help_and_phony_name_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert set(phony.split()) == targets


def test_no_module_is_longer_than_the_style_allows() -> None:
    files = [path for folder in PACKAGES.values() for path in folder.rglob("*.py")]
    assert files
    long = {str(p.relative_to(ROOT)): n for p in files if (n := len(p.read_text().splitlines())) > MAX_LINES}
    assert not long


@pytest.mark.parametrize("python_version", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize("name", ["all", "jax"])
def test_constraints_meet_the_package_requirements(name: str, python_version: str) -> None:
    marker_values = {"python_version": python_version, "python_full_version": f"{python_version}.0", "extra": ""}
    pins: dict[str, str] = {}
    for file in ("base.txt", "cuda-plugin.txt", f"{name}.txt"):
        for line in (ROOT / "constraints" / file).read_text().splitlines():
            if not line or line.startswith(("#", "-c ")):
                continue
            pin = Requirement(line)
            (specifier,) = pin.specifier
            assert specifier.operator == "==", line
            if pin.marker is None or pin.marker.evaluate(marker_values):
                assert pin.name not in pins, line
                pins[pin.name] = specifier.version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["jax"], *extras["test"]]
    if name == "all":
        wanted += [*extras["torch"], *(line for line in extras["models"] if not line.startswith("mla-decode"))]
    for requirement in map(Requirement, wanted):
        if requirement.marker is None or requirement.marker.evaluate(marker_values):
            assert requirement.specifier.contains(pins[requirement.name]), f"{requirement}: {pins[requirement.name]} is pinned"
    assert pins["jax"] == pins["jaxlib"] == pins["jax-cuda13-plugin"]


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def find_python(folder: Path, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    env = {**environment(), "PATH": f"{folder}:/usr/bin:/bin", "PYENV_ROOT": str(folder), **extra}
    command = ["sh", str(ROOT / "tools" / "find_python.sh"), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def test_find_python_passes_over_interpreters_that_do_not_run(tmp_path: Path) -> None:
    base = getattr(sys, "_base_executable", sys.executable)
    script(tmp_path / "python3", "exit 127")
    version = f"3.{sys.version_info.minor}"
    script(tmp_path / f"python{version}", "echo 'command not found' >&2; exit 127")
    folder = tmp_path / "versions" / f"{version}.99" / "bin"
    folder.mkdir(parents=True)
    script(folder / "python3", f'exec {base} "$@"')
    done = find_python(tmp_path, version)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).resolve() == Path(base).resolve()


def test_find_python_says_what_it_looked_for(tmp_path: Path) -> None:
    done = find_python(tmp_path, "3.4")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "3.4" in done.stderr
    done = find_python(tmp_path, PYTHON=str(tmp_path / "missing"))
    assert done.returncode == 1
    assert "3.11 or newer" in done.stderr
    assert "missing" in done.stderr
