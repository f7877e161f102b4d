"""What is shipped: pins in step, the right files in wheel and sdist, and `import tq` on torch and numpy alone."""

import ast
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
SMOKE = ROOT / ".ci" / "smoke.py"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCKED_EXTRAS = ("kernels", "checkpoint", "lab", "book", "test")
# What a plain `pip install tq-book` must not need. pandas and the rest belong to the extras.
FOREIGN = (
    "numba triton pandas scipy matplotlib seaborn papermill nbclient nbformat nbval jupyter jupyter_core jupyterlab "
    "jupyter_book ipykernel IPython sphinx myst_nb tokenizers yaml tqdm psutil hypothesis pytest bitsandbytes torchao"
).split()


def direct() -> list[Requirement]:
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    return [Requirement(r) for r in project["dependencies"] + [r for e in LOCKED_EXTRAS for r in extras[e]]]


def pins(lines: list[str]) -> dict[str, Requirement]:
    found = [Requirement(line) for line in lines if line and not line.startswith(("#", "-"))]
    return {canonicalize_name(r.name): r for r in found}


def version(pin: Requirement) -> str:
    (specifier,) = pin.specifier
    assert specifier.operator == "==", f"{pin} is not pinned with =="
    return specifier.version


# not all of sys.path: setuptools, once imported, adds a folder with older copies of what it needs itself
INSTALLED = sorted({sysconfig.get_path(kind) for kind in ("purelib", "platlib")})
LOCK = pins((ROOT / "requirements.lock").read_text().splitlines())


# --- pins -----------------------------------------------------------------------------------------------------


def test_dependencies_are_torch_and_numpy_only() -> None:
    assert sorted(Requirement(r).name for r in PYPROJECT["project"]["dependencies"]) == ["numpy", "torch"]


def test_lock_satisfies_pyproject() -> None:
    for requirement in direct():
        name = canonicalize_name(requirement.name)
        assert name in LOCK, f"{name} is missing in requirements.lock; run `make lock`"
        assert requirement.specifier.contains(version(LOCK[name])), f"{LOCK[name]} does not satisfy {requirement}"


def test_lock_pins_everything_and_names_no_local_build() -> None:
    for pin in LOCK.values():
        assert "+" not in version(pin), f"{pin}: a local version exists on one index only"
        assert not pin.name.startswith(("nvidia-", "cuda-")), f"{pin.name}: torch pins its CUDA libraries itself"


@pytest.fixture(scope="module")
def lock() -> ModuleType:
    """The script behind `make lock`."""
    spec = importlib.util.spec_from_file_location("lock", ROOT / ".ci" / "lock.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_pin_can_be_installed_on_every_supported_python(lock: ModuleType) -> None:
    """From the metadata of what is installed here; a package of another version says nothing about its pin."""
    assert {"3.11": "3.11.2", "3.12": "3.12.3", "3.13": "3.13.0"}.items() <= lock.PYTHONS.items()
    packages = {
        canonicalize_name(found.name): {"version": found.version, "requires_python": found.metadata["Requires-Python"]}
        for found in importlib.metadata.distributions(path=INSTALLED)
    }
    same = {n for n, pin in LOCK.items() if n in packages and Version(packages[n]["version"]).public == version(pin)}
    needed = {
        python: {n for n in same if not (m := LOCK[n].marker) or m.evaluate({"python_version": python})}
        for python in lock.PYTHONS
    }
    assert lock.not_installable(packages, needed) == []
    here = {n for n, pin in LOCK.items() if not pin.marker or pin.marker.evaluate()}
    if others := sorted(here - same):
        pytest.skip(f"not installed here as pinned, so not checked: {', '.join(others)}")


def test_a_pin_that_the_lowest_python_cannot_install_is_refused(lock: ModuleType) -> None:
    packages = {
        "late": {"version": "4.1", "requires_python": ">=3.11.5"},
        "early": {"version": "2.0", "requires_python": ">=3.9,!=3.14.1"},
        "old": {"version": "1.0", "requires_python": "<3.13"},
        "silent": {"version": "1.0"},
    }
    needed = {python: {"early", "silent"} for python in lock.PYTHONS}
    assert lock.not_installable(packages, needed) == []
    needed["3.11"] |= {"late", "old"}
    needed["3.13"] |= {"late", "old"}
    assert lock.not_installable(packages, needed) == [
        "late==4.1 needs Python >=3.11.5, not 3.11.2",
        "old==1.0 needs Python <3.13, not 3.13.0",
    ]


def test_environment_yml_carries_the_pins_of_the_lock() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    (pip_lines,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    assert "-c requirements.lock" in pip_lines
    found = pins(pip_lines)
    wanted = {canonicalize_name(r.name) for r in direct()}
    assert set(found) == wanted
    assert {name: str(pin) for name, pin in found.items()} == {name: str(LOCK[name]) for name in wanted}


def test_python_range_is_the_same_everywhere() -> None:
    assert PYPROJECT["project"]["requires-python"] == ">=3.11"
    assert PYPROJECT["tool"]["ruff"]["target-version"] == "py311"
    assert PYPROJECT["tool"]["mypy"]["python_version"] == "3.11"


def test_version_is_the_same_everywhere() -> None:
    wanted = PYPROJECT["project"]["version"]
    assert f'__version__ = "{wanted}"' in (ROOT / "tq" / "__init__.py").read_text()
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == wanted


# --- package list ---------------------------------------------------------------------------------------------


def folders_of(root: Path) -> set[str]:
    """Every importable folder under tq/, as a dotted name; kernels/ is tq.kernels."""
    found = {p.parent for p in (root / "tq").rglob("*.py") if "__pycache__" not in p.parts}
    return {".".join(folder.relative_to(root).parts) for folder in found} | {"tq.kernels", "tq.data"}


def test_package_list_is_complete() -> None:
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == folders_of(ROOT)


def test_kernels_folder_is_no_package_of_its_own() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists(), "kernels/__init__.py would make a top-level `kernels`"
    assert list((ROOT / "kernels").glob("*.py")), "kernels/ holds no module"


# --- wheel and sdist ------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(wheel, sdist), built from a copy so that the checkout stays clean."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in ("tq", "kernels"):
        shutil.copytree(ROOT / folder, source / folder, ignore=ignore)
    (source / "data").mkdir()
    for table in (ROOT / "data").glob("*.csv"):
        shutil.copy(table, source / "data")
    for name in ("pyproject.toml", "LICENSE", "LICENSE-CC-BY-4.0"):
        shutil.copy(ROOT / name, source)
    quiet = {"check": True, "cwd": source, "capture_output": True, "text": True}
    sdist_code = f"from setuptools.build_meta import build_sdist; build_sdist({str(out)!r})"
    subprocess.run([sys.executable, "-c", sdist_code], **quiet)
    (sdist,) = out.glob("*.tar.gz")
    # From the sdist, so that the wheel also proves that the sdist is complete.
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--disable-pip-version-check", "-w", str(out), str(sdist)], **quiet)
    (wheel,) = out.glob("*.whl")
    return wheel, sdist


def test_wheel_contains_kernels_inside_tq(built: tuple[Path, Path]) -> None:
    names = zipfile.ZipFile(built[0]).namelist()
    modules = sorted(p.name for p in (ROOT / "kernels").glob("*.py"))
    assert sorted(Path(n).name for n in names if n.startswith("tq/kernels/") and n.endswith(".py")) == modules
    assert {n.split("/")[0] for n in names} == {"tq", f"tq_book-{PYPROJECT['project']['version']}.dist-info"}
    assert "tq/py.typed" in names
    assert {n.split("/")[-1] for n in names if "/licenses/" in n} == {"LICENSE", "LICENSE-CC-BY-4.0"}


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_string(archive.read(name).decode())


def test_extras_are_named_by_use(built: tuple[Path, Path], lock: ModuleType) -> None:
    found = metadata(built[0])
    assert {"kernels", "checkpoint", "book"} <= set(found.get_all("Provides-Extra", []))
    assert {"kernels", "checkpoint", "book"} <= set(lock.EXTRAS)
    needed: dict[str, set[str]] = {"": set()}
    for line in found.get_all("Requires-Dist", []):
        requirement = Requirement(line)
        extra = re.search(r'extra == "(\w+)"', str(requirement.marker))
        needed.setdefault(extra[1] if extra else "", set()).add(requirement.name)
    assert needed[""] == {"torch", "numpy"} and needed["kernels"] == {"numba", "triton"}
    assert needed["checkpoint"] == {"numba", "safetensors"}


def test_the_metadata_are_valid(built: tuple[Path, Path]) -> None:
    """As the index checks them: fields, versions and licence expression."""
    with zipfile.ZipFile(built[0]) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        found = Metadata.from_email(archive.read(name))
    assert found.name == "tq-book" and found.requires_python == ">=3.11" and found.summary and found.license_expression
    assert found.description_content_type == "text/markdown" and "Typing :: Typed" in (found.classifiers or [])


def test_the_page_on_the_index_links_to_nothing_in_the_repository(built: tuple[Path, Path]) -> None:
    text = str(metadata(built[0]).get_payload())
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    links = re.findall(r"\]\(([^)]*)\)|^\[[^]]+\]: *(\S+)|(?:src|href)=[\"']([^\"']*)", prose, re.MULTILINE)
    targets = ["".join(link) for link in links]
    assert targets and all(target.startswith("https://") for target in targets), targets
    assert "![" not in prose  # an image would have to be hosted


def measured(text: str) -> str:
    (found,) = re.findall(r"<!-- measured:begin -->\n(.*?)<!-- measured:end -->", text, re.DOTALL)
    return str(found)


def test_the_page_on_the_index_says_what_was_recorded(built: tuple[Path, Path]) -> None:
    page, readme = str(metadata(built[0]).get_payload()), (ROOT / "README.md").read_text(encoding="utf-8")
    assert measured(page) == measured(readme), "run: python -m tq.book readme"
    rest = re.sub(r"```.*?```|`[^`\n]*`", "", page.replace(measured(page), ""), flags=re.DOTALL)
    assert not re.search(r"\d (?:bytes|nats|times)|\d[%×]", rest), "a number that was typed"


def test_wheel_contains_every_module(built: tuple[Path, Path]) -> None:
    names = set(zipfile.ZipFile(built[0]).namelist())
    source = {p.relative_to(ROOT).as_posix() for p in (ROOT / "tq").rglob("*.py") if "__pycache__" not in p.parts}
    assert source - {"tq/kernels/__init__.py"} <= names


def test_sdist_contains_the_kernels(built: tuple[Path, Path]) -> None:
    names = ["/".join(n.split("/")[1:]) for n in tarfile.open(built[1]).getnames()]
    for kernel in (ROOT / "kernels").glob("*.py"):
        assert f"kernels/{kernel.name}" in names
    assert {"pyproject.toml", "tq/README.md", "LICENSE", "LICENSE-CC-BY-4.0"} <= set(names)


@pytest.fixture(scope="session")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel in a folder of its own; torch and numpy still come from this environment."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run([*command, "-q", "--target", str(target), str(built[0])], check=True, capture_output=True)
    return target


PREAMBLE = """
import sys
import sysconfig
sys.path.insert(0, {site!r})
from importlib.machinery import PathFinder
find = PathFinder.find_spec
def find_unblocked(name, path=None, target=None):  # as if it were not installed: nothing is found
    return None if name.split(".")[0] in {blocked!r} else find(name, path, target)
PathFinder.find_spec = staticmethod(find_unblocked)  # some call it on an instance
"""


def run_installed(site: Path, body: str, blocked: tuple[str, ...] | list[str] = ()) -> str:
    """Runs `body` against the installed wheel, away from the checkout, warnings as errors."""
    code = PREAMBLE.format(site=str(site), blocked=tuple(blocked)) + body
    command = [sys.executable, "-I", "-W", "error", "-c", code]
    result = subprocess.run(command, cwd=site, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_installed_wheel_is_what_is_imported(installed: Path) -> None:
    out = run_installed(installed, "import tq; print(tq.__file__)", FOREIGN)
    assert Path(out.strip()) == installed / "tq" / "__init__.py"


def test_import_and_round_trip_without_the_extras(installed: Path) -> None:
    body = """
import torch
from tq import Code, Codec
x = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
for bits in (1, 4, 8):
    codec = Codec(bits=bits)
    code = codec.encode(x)
    y = codec.decode(Code.from_bytes(code.to_bytes()))
    error = ((x - y).square().sum() / x.square().sum()).item()
    assert y.shape == x.shape and error < 0.9 * 0.35 ** (bits - 1), (bits, error)
print("ok")
"""
    assert run_installed(installed, body, FOREIGN).strip() == "ok"


def test_models_find_their_tables_without_a_checkout(installed: Path) -> None:
    body = """
from tq.systems import Cluster, Layout, predict
from tq.systems import Transformer
from tq.systems.tables import folder
model = Transformer(layers=2, hidden=256, heads=4, vocab=1024, seq=128)
assert predict(model, Layout(), Cluster("a100-80gb", 1)).iteration_s > 0
print(folder())
"""
    assert Path(run_installed(installed, body, FOREIGN).strip()) == installed / "tq" / "data"


def test_what_codes_write_is_what_it_was(installed: Path) -> None:
    """The digests that every release is held to, with the kernels and without; and the script of the releases runs."""
    body = f"""
import runpy
sys.argv = ["smoke.py", "--only", "codec,lossless,systems"]
runpy.run_path({str(SMOKE)!r}, run_name="__main__")
"""
    for blocked in ((), FOREIGN):
        out = run_installed(installed, body, blocked)
        assert out.splitlines()[-1].startswith("3 doors, 0 failed")


def test_every_public_name_is_tried_by_the_smoke_test() -> None:
    """What the API reference imports is public; the recorder needs a checkout."""
    page, smoke = (ROOT / "book" / "reference.md").read_text(encoding="utf-8"), SMOKE.read_text(encoding="utf-8")
    public = set()
    for block in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("tq") and node.module != "tq.book":
                public |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Import):
                public |= {alias.name for alias in node.names if alias.name.startswith("tq.")}
    assert len(public) > 60
    assert {name for name in public if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", smoke)} == set()


def test_the_release_tries_what_the_page_promises() -> None:
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    smoke = release["jobs"]["smoke"]["strategy"]["matrix"]
    script = (ROOT / ".ci" / "wheel").read_text()
    for name, versions in (("PYTHONS", smoke["python"]), ("TORCHES", smoke["torch"])):
        assert f"${{{name}:-{' '.join(versions)}}}" in script
    page = (ROOT / "tq" / "README.md").read_text(encoding="utf-8")
    for kind, versions in (("Python", smoke["python"]), ("PyTorch", smoke["torch"])):
        assert f"{kind} {versions[0]} to {versions[-1]}" in page
    (floor,) = [Requirement(line) for line in PYPROJECT["project"]["dependencies"] if line.startswith("torch")]
    assert str(floor.specifier) == f">={smoke['torch'][0]}"
    assert release["jobs"]["publish"]["needs"] == "smoke" and release["jobs"]["smoke"]["needs"] == "build"
    assert release["jobs"]["publish"]["permissions"] == {"id-token": "write"}


def test_a_checker_of_types_sees_the_types_of_the_installed_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    with zipfile.ZipFile(built[0]) as archive:
        archive.extractall(site)
    (tmp_path / "user.py").write_text("from tq import Codec\nreveal_type(Codec(bits=4).encode)\n")
    command = [sys.executable, "-m", "mypy", "--python-executable", str(tmp_path / "env" / "bin" / "python")]
    command += ["--config-file", "", "--cache-dir", str(tmp_path / "cache"), "user.py"]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    assert "tq.quant.codec.Code" in out and "py.typed" not in out, out


def test_import_does_not_pull_in_the_extras(installed: Path) -> None:
    """Here everything may be imported, and is not. What torch itself imports does not count."""
    body = """
import torch
before = set(sys.modules)
import tq
print(sorted({name.split(".")[0] for name in set(sys.modules) - before}))
"""
    loaded = set(re.findall(r"'(\w+)'", run_installed(installed, body)))
    assert not loaded & set(FOREIGN), loaded & set(FOREIGN)


def test_kernels_of_the_wheel_are_found_beside_a_foreign_kernels_package(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("FOREIGN = True\n")
    kernel = min(p.stem for p in (ROOT / "kernels").glob("*.py"))
    body = f"""
sys.path.insert(0, {str(tmp_path)!r})
import importlib.util
import kernels, tq
assert kernels.FOREIGN
print(importlib.util.find_spec("tq.kernels.{kernel}").origin)
"""
    assert run_installed(installed, body).strip() == str(installed / "tq" / "kernels" / f"{kernel}.py")
