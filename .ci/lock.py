"""Writes requirements.lock and environment.yml from pyproject.toml. It resolves; it installs nothing.

`make lock` keeps today's pins and adds or drops what pyproject.toml asks for; `make lock UPGRADE=1` takes the
newest versions. pip resolves the direct requirements for the lowest supported Python, as if nothing were installed;
because it evaluates markers for the running interpreter only, the closure is walked again here for each supported
Python, and a package that only some of them need gets a marker. A pin that one of them could not install is refused.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements.lock"
ENVIRONMENT = ROOT / "environment.yml"
EXTRAS = ("kernels", "checkpoint", "lab", "book", "test")  # [peers] are measured where they are present, never required
# The lowest release of each supported Python: what Debian 12 and Ubuntu 24.04 bring, else the first one.
PYTHONS = {"3.11": "3.11.2", "3.12": "3.12.3", "3.13": "3.13.0", "3.14": "3.14.0"}
LOWEST = min(PYTHONS.values(), key=Version)
CONDA_PYTHON = "3.12"
# CUDA libraries: which ones there are depends on the torch build that the machine takes, and torch pins them itself.
UNPINNED_PREFIXES = ("nvidia-", "cuda-")

LOCK_HEADER = """\
# Every package of the book, pinned: pip install -r requirements.lock && pip install --no-deps -e .
# For Linux x86-64 with Python {lowest} to {highest}. Written by `make lock`; edit pyproject.toml, not this file.
# torch brings its own CUDA libraries, which it pins itself; a CPU-only build of the same version fits too.
"""
ENVIRONMENT_HEADER = """\
# For conda users: conda env create -f environment.yml && conda activate tq-book && make reproduce PY=python
# The direct requirements with the pins of requirements.lock, which also holds the rest. Written by `make lock`.
name: tq-book
channels: [conda-forge]
dependencies:
  - python={python}
  - pip
  - make
  - pip:
      - -c requirements.lock
"""


def direct_requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["dependencies"] + [r for e in EXTRAS for r in project["optional-dependencies"][e]]
    return [Requirement(line) for line in lines]


def resolve(requirements: list[str], constraints: Path | None) -> dict[str, dict]:
    """pip's choice as {canonical name: metadata}."""
    with tempfile.TemporaryDirectory() as tmp:
        report = Path(tmp) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--disable-pip-version-check", "--report", str(report), *requirements]
        # Nothing is installed; pip takes another Python's version only together with a target and without builds.
        command += ["--target", tmp, "--only-binary", ":all:", "--python-version", LOWEST]
        if constraints:
            command += ["-c", str(constraints)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            hint = f"Take lines that no longer fit out of {constraints.name}, or use UPGRADE=1." if constraints else ""
            sys.exit(f"pip could not resolve the requirements for Python {LOWEST}:\n{result.stderr}{hint}")
        items = json.loads(report.read_text())["install"]
    return {canonicalize_name(item["metadata"]["name"]): item["metadata"] for item in items}


def reachable(packages: dict[str, dict], roots: list[Requirement], python: str) -> tuple[set[str], list[str]]:
    """The packages that one Python version needs, and the requirements that `packages` lacks for it."""
    base = {**default_environment(), "python_version": python, "python_full_version": PYTHONS[python]}
    seen: set[tuple[str, str]] = set()
    missing: list[str] = []
    queue = [(r, "") for r in roots]
    while queue:
        requirement, extra = queue.pop()
        if requirement.marker and not requirement.marker.evaluate({**base, "extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        if name.startswith(UNPINNED_PREFIXES):
            continue
        if name not in packages:
            missing.append(f"{requirement.name}{requirement.specifier}")
            continue
        for wanted in {"", *requirement.extras}:
            if (name, wanted) not in seen:
                seen.add((name, wanted))
                queue += [(Requirement(line), wanted) for line in packages[name].get("requires_dist", [])]
    return {name for name, _ in seen}, missing


def not_installable(packages: dict[str, dict], needed: dict[str, set[str]]) -> list[str]:
    """A sentence for each package that a Python needs and that its lowest release could not install."""
    found = []
    for python, names in needed.items():
        for name in sorted(names):
            accepted = packages[name].get("requires_python") or ""
            if PYTHONS[python] not in SpecifierSet(accepted):
                found.append(f"{name}=={packages[name]['version']} needs Python {accepted}, not {PYTHONS[python]}")
    return found


def marker(pythons: list[str]) -> str:
    return "" if len(pythons) == len(PYTHONS) else " ; " + " or ".join(f'python_version == "{p}"' for p in pythons)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions instead of keeping the pins")
    keep = None if parser.parse_args().upgrade or not LOCK.exists() else LOCK

    roots = direct_requirements()
    wanted = [str(r) for r in roots]
    while True:
        packages = resolve(wanted, keep)
        missing = {m for p in PYTHONS for m in reachable(packages, roots, p)[1]}
        if not missing:
            break
        wanted += sorted(missing)

    needed = {p: reachable(packages, roots, p)[0] for p in PYTHONS}
    if found := not_installable(packages, needed):
        sys.exit("Not every supported Python could install these pins:\n" + "\n".join(found))
    own_marker = {canonicalize_name(r.name): f" ; {r.marker}" for r in roots if r.marker}
    pins: dict[str, str] = {}
    for name in sorted(set().union(*needed.values())):
        pythons = [p for p in PYTHONS if name in needed[p]]
        version = Version(packages[name]["version"]).public  # without a local part such as +cpu
        pins[name] = f"{packages[name]['name']}=={version}{own_marker.get(name) or marker(pythons)}"

    header = LOCK_HEADER.format(lowest=LOWEST, highest=max(PYTHONS, key=Version))
    LOCK.write_text(header + "\n".join(pins.values()) + "\n")
    direct = sorted({canonicalize_name(r.name) for r in roots})
    lines = "".join(f"      - {pins[name]}\n" for name in direct)
    ENVIRONMENT.write_text(ENVIRONMENT_HEADER.format(python=CONDA_PYTHON) + lines + "      - -e .\n")
    print(f"{LOCK.name}: {len(pins)} packages; {ENVIRONMENT.name}: {len(direct)} direct requirements")


if __name__ == "__main__":
    main()
