"""The page of the API: it names every public name, each is described in full, and every example runs.

The page is book/reference.md; its directives say what stands on it, so that page and test cannot differ.
"""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
DIRECTIVE = re.compile(r"^\.\. auto(class|function|data):: (tq[\w.]*)\.(\w+)$", re.MULTILINE)
ALL = None
#: What the page must name, by the module that a reader imports it from. ALL: what the module's __all__ says.
DOORS: dict[str, list[str] | None] = {
    "tq": ALL,
    "tq.quant.codebook": ["lloyd_max"],
    "tq.quant.inner_product": ["ProdCodec"],
    "tq.quant.logscale": ["LogCodec"],
    "tq.quant.formats": [
        "Format", "affine", "fp4", "fp8", "integer", "mxfp4", "mxfp8", "nf4", "nf4_double_quantized", "nmse", "nvfp4",
        "of_codec",
    ],
    "tq.train.collectives": ["Work", "all_reduce"],
    "tq.backend": ["Config", "configure", "load_state_dict", "report", "state_dict"],
    "tq.train.hooks": ["HookState", "ReduceScatter", "ddp_hook"],
    "tq.train.diloco": ["DiLoCo"],
    "tq.train.optim": ["TurboQuantAdamW"],
    "tq.train.offload": ["OffloadedAdamW"],
    "tq.quant.lossless": ["Encoded", "decode", "encode"],
    "tq.train.tqk": ["Background", "Checkpoints", "File", "load", "save"],
    "tq.train.tqk.peers": ["PeerMemory"],
    "tq.train.tqk.dcp": ["Reader", "Writer"],
    "tq.train.activations": ["Report", "compress_activations"],
    "tq.train.coded_checkpoints": ["coded_checkpoints"],
    "tq.train.planned": ["compress_activations", "plan_activations", "plan_lowest_peak", "plan_within_peak"],
    "tq.train.planned.partition": ["PlannedBackend"],
    "tq.train.recompute": ["CodedResults"],
    "tq.train.stream": ["StreamedTrainer"],
    "tq.train.linear": ["CompressedLinear", "linear", "replace_linears"],
    "tq.train.model": ALL,
    "tq.infer.allocation": ["allocate_bits"],
    "tq.infer.weights": ["decoded", "load", "quantize", "save"],
    "tq.infer.layers": ["QuantizedLinear", "stored_bits"],
    "tq.infer.decoder": ["Decoder"],
    "tq.infer.kv": ["Coder", "bytes_per_token", "calibrate", "coders", "with_coded_attention"],
    "tq.infer.pages": ["Pages", "attend"],
    "tq.infer.direct": ["DirectLinear", "direct"],
    "tq.infer.evaluate": ["divergence"],
    "tq.infer.pretrained": ["Language", "load"],
    "tq.infer.trellis": ["TrellisCode", "TrellisLinear", "trellis"],
    "tq.infer.path_product": ["PathProduct"],
    "tq.infer.tuning": ["tune"],
    "tq.systems": ALL,
    "tq.economics.calculator": ALL,
    "tq.book.results": ALL,
}  # fmt: skip


PAGE = (ROOT / "book/reference.md").read_text(encoding="utf-8")
#: {title: Markdown} of the sections that describe something.
SECTIONS = {part.split("\n")[0]: part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE) if DIRECTIVE.search(part)}


def page() -> list[tuple[str, str, str]]:
    """(kind, module, name) of every directive."""
    return DIRECTIVE.findall(PAGE)


def find(module: str, name: str) -> Any:
    found = getattr(importlib.import_module(module), name)
    return getattr(found, "_init_fn", found)  # the function behind an operator of PyTorch's


def text_of(thing: Any) -> str:
    """A docstring of its own, not an inherited one."""
    own = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
    return inspect.cleandoc(own or "")


def described(text: str) -> set[str]:
    """The names to which a docstring gives a line of their own: ``x: what it is``, ``x, y: what they are``."""
    found = re.findall(r"^ +((?:\*{0,2}\w+)(?:, \*{0,2}\w+)*)(?: \([^)]*\))?: ", text, re.MULTILINE)
    return {name.lstrip("*") for names in found for name in names.split(", ")}


def parameters(thing: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(thing).parameters) - {"self", "cls"}


def methods(thing: type) -> Iterator[tuple[str, Any]]:
    """The public methods on the page, which are those with a docstring, without those that stand in for PyTorch's."""
    for name, member in vars(thing).items():
        inner = getattr(member, "__func__", member)
        ours = not any(hasattr(base, name) for base in thing.__mro__[1:] if not base.__module__.startswith("tq."))
        if inspect.isfunction(inner) and inner.__doc__ and ours and not name.startswith("_"):
            yield name, inner


NAMES = [(module, name) for kind, module, name in page() if kind != "data"]
each = pytest.mark.parametrize(("module", "name"), NAMES, ids=[f"{module}.{name}" for module, name in NAMES])


def test_the_page_names_every_public_name_once() -> None:
    named = defaultdict(list)
    for _, module, name in page():
        named[module].append(name)
    wanted = {module: names or importlib.import_module(module).__all__ for module, names in DOORS.items()}
    assert {module: sorted(names) for module, names in named.items()} == {m: sorted(n) for m, n in wanted.items()}


def test_no_directive_escapes_the_test() -> None:
    assert PAGE.count(".. auto") == len(page())


@pytest.mark.parametrize(("kind", "module", "name"), page())
def test_a_directive_fits_what_it_names(kind: str, module: str, name: str) -> None:
    thing = find(module, name)
    assert kind == ("class" if inspect.isclass(thing) else "function" if inspect.isfunction(thing) else "data")


@pytest.mark.parametrize(("module", "name"), [(module, name) for kind, module, name in page() if kind == "data"])
def test_data_is_described_by_a_comment_or_the_page(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "book/_ext")
    lines = ["the docstring of its type"]
    importlib.import_module("tqreference").after(None, "data", f"{module}.{name}", find(module, name), None, lines)
    assert "the docstring of its type" not in lines
    assert lines or re.search(rf"^\.\. autodata:: {module}\.{name}\n(?:   :.*\n)*\n   \w", PAGE, re.MULTILINE)


@each
def test_a_name_is_described_in_full(module: str, name: str) -> None:
    thing = find(module, name)
    text = text_of(thing)
    assert text, "no docstring"
    assert parameters(thing) - described(text) == set(), "parameters that are not described"
    assert ">>> " in text, "no example"


@each
def test_its_methods_say_what_they_take(module: str, name: str) -> None:
    thing = find(module, name)
    found = methods(thing) if inspect.isclass(thing) else ()
    wrong = {method: parameters(inner) - set(re.findall(r"\w+", text_of(inner))) for method, inner in found}
    assert {method: missing for method, missing in wrong.items() if missing} == {}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("Args:\n    bits: so many.\n    a, *b: two.\n", {"bits", "a", "b"}),
        ("Args:\n    bits (int): so many.\n    **more: others.\n", {"bits", "more"}),
        ("bits: at the margin is no list.\n\n    a word and bits: no list.", set()),
    ],
)
def test_what_counts_as_described(text: str, names: set[str]) -> None:
    assert described(text) == names


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory that is a book of its own, without chapters, with the committed tables to read."""
    (tmp_path / "_toc.yml").write_text("format: jb-book\nroot: book/index\n")
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "data").symlink_to(ROOT / "data", target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TQ_BOOK_ROOT", str(tmp_path))
    monkeypatch.delenv("TQ_BOOK_OUT", raising=False)


@pytest.mark.parametrize("title", SECTIONS)
@pytest.mark.usefixtures("elsewhere")
def test_the_examples_run(title: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each after the imports at the head of its section, as a reader would run it."""
    imported: dict[str, Any] = {}
    exec("".join(re.findall(r"^```python\n(.*?)^```$", SECTIONS[title], re.MULTILINE | re.DOTALL)), imported)
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for kind, module, name in DIRECTIVE.findall(SECTIONS[title]):
        for test in finder.find(find(module, name), name, module=False, globs=imported) if kind != "data" else ():
            runner.run(test)
    assert runner.failures == 0, capsys.readouterr().out
    assert runner.tries > 0
