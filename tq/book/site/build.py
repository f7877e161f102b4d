"""The HTML of the book, built by Jupyter Book from a staged copy with execution off and warnings as errors.

The copy holds the fresh notebooks where a fresh run is shown. Provenance is written by the extension tqprovenance,
which is told whose outputs are fresh. A build that fails leaves the last good HTML in its place.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tq.book import paths
from tq.book.run import clean, stamps

LINKED = ("tq", "kernels", "data", "tests")  # for literalinclude and tables read by prose


def with_launch_buttons(config: str, repository: str) -> str:
    """The book's configuration with buttons that open a chapter in Colab or Binder, links that load nothing before.

    repository: "owner/name" on GitHub, or nothing: no button, as a book that is built from a disk has no such place.
    """
    if not repository:
        return config
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise ValueError(f"TQ_REPOSITORY={repository!r}: owner/name is needed")
    buttons = '{binderhub_url: "https://mybinder.org", colab_url: "https://colab.research.google.com", thebe: false}'
    config = re.sub(r"^launch_buttons:.*$", f"launch_buttons: {buttons}", config, flags=re.MULTILINE)
    config = config.replace("use_repository_button: false", "use_repository_button: true")
    return f"{config}\nrepository: {{url: 'https://github.com/{repository}', branch: main}}\n"


def stage(fresh: bool, device: str, profile: str) -> tuple[Path, list[str]]:
    """Copies what the book is built from; with `fresh` the notebooks just executed, where they are up to date.

    Returns the copy and the chapters whose outputs are fresh.
    """
    root, target = paths.root(), paths.build() / "stage" / ("fresh" if fresh else "committed")
    shutil.rmtree(target, ignore_errors=True)
    (target / "notebooks").mkdir(parents=True)
    shutil.copy2(root / "_toc.yml", target / "_toc.yml")
    config = (root / "_config.yml").read_text(encoding="utf-8")
    paths.write_text(target / "_config.yml", with_launch_buttons(config, os.environ.get("TQ_REPOSITORY", "")))
    for name in ("book", "assets"):
        if (root / name).is_dir():
            shutil.copytree(root / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in LINKED:
        if (root / name).is_dir():
            (target / name).symlink_to(root / name, target_is_directory=True)
    shown = []
    for chapter in paths.chapters():
        nb = paths.read_json(paths.notebook(chapter)) or {}
        if fresh and stamps.why_run(chapter, device, profile) is None:
            ran = paths.read_json(stamps.folder(device, profile) / f"{chapter}.ipynb") or {}
            nb = clean.with_outputs(nb, ran)
            shown.append(chapter)
        paths.write_text(target / "notebooks" / f"{chapter}.ipynb", clean.dumps(clean.clean(nb)))
    return target, shown


def build_book(fresh: bool = False, device: str = "cpu", profile: str = "quick") -> int:
    """Builds the HTML and says where it is; returns the exit code.

    Committed: from `notebooks/` and `data/` to `_build/html`. fresh: from the last runs of that device and profile,
    where they are up to date, to `_build/fresh/html`.
    """
    paths.check_view(device, profile)
    with stamps.lock("lock-html"):
        source, shown = stage(fresh, device, profile)
        made = source.with_name(source.name + "-out")
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir()
        env = dict(os.environ, TQ_BOOK_ROOT=str(paths.root()), TQ_BOOK_FRESH="1" if fresh else "0")
        env["TQ_BOOK_FRESH_CHAPTERS"] = " ".join(shown)
        env["PYTHONPATH"] = os.pathsep.join(
            filter(None, [env.get("PYTHONPATH"), str(paths.PACKAGE)])
        )
        # Version 1 has no `-m jupyter_book`; its script may belong to another interpreter. Python would look through
        # millions of nodes for garbage again and again: with rarer looks the build takes a sixth less time.
        start = "import gc, sys; gc.set_threshold(200_000, 50, 1000); "
        start += "from jupyter_book.cli.main import main; sys.exit(main())"
        command = [sys.executable, "-c", start, "build", str(source), "--path-output", str(made)]
        done = subprocess.run(
            [*command, "--all", "-W", "--keep-going", "-n"], env=env, cwd=paths.root(), stdin=subprocess.DEVNULL,
            capture_output=True, text=True,
        )  # fmt: skip
        paths.write_text(paths.build() / "html.log", done.stdout + done.stderr)
        if done.returncode != 0:
            lines = (done.stdout + done.stderr).replace(f"{source}/", "").splitlines()
            shown = [line for line in lines if re.search(r"WARNING|ERROR", line)] or lines[-30:]
            print("the book was not built:\n  " + "\n  ".join(shown), file=sys.stderr)
            print("the whole log: _build/html.log", file=sys.stderr)
            return 1
        target = paths.build() / "fresh" / "html" if fresh else paths.build() / "html"
        target.parent.mkdir(exist_ok=True)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(made / "_build" / "html", target)
        print(f"The book: {os.path.relpath(target / 'index.html')}")
    return 0
