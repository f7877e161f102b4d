"""The API reference: what sphinx.ext.autodoc and sphinx.ext.napoleon leave out of the signatures and texts of the code.

That is the types of what a docstring lists under "Attributes:", the ``#:`` comment of a name that a package only
imports, and the function behind an operator of PyTorch's.
"""

from __future__ import annotations

import ast
import importlib
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.domains.python import PyObject
from sphinx.errors import PycodeError
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docstrings import prepare_docstring


def home(module: str, name: str) -> str:
    """The module in which an imported name is assigned."""
    source = ModuleAnalyzer.for_module(module).code
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom) and node.module and name in [alias.name for alias in node.names]:
            return home(importlib.import_module(node.module).__name__, name)
    return module


def operator(app: Sphinx, obj: Any, bound_method: bool) -> None:
    """Gives an operator of PyTorch's (``torch.library.custom_op``) the signature of its function."""
    if hasattr(obj, "_init_fn"):
        obj.__wrapped__ = obj._init_fn


def before(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Gives an operator the docstring of its function."""
    if hasattr(obj, "_init_fn"):
        lines[:] = prepare_docstring(obj._init_fn.__doc__ or "")


def after(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Describes data by its ``#:`` comment, not by the docstring of its type.

    What stands before a colon in the first line of a property is no type of its own: the signature has it already.
    """
    if what == "property":
        for line in [line for line in lines if line.startswith(":type: ")]:
            lines.remove(line)
            said = line.removeprefix(":type: ")
            if not _is_type(said):
                lines[0] = f"{said}: {lines[0]}"
    if what == "data":
        module, _, last = name.rpartition(".")
        try:
            found = ModuleAnalyzer.for_module(home(module, last)).find_attr_docs()
        except PycodeError:
            found = {}
        lines[:] = found.get(("", last), [])


def _is_type(text: str) -> bool:
    try:
        ast.parse(text, mode="eval")
    except SyntaxError:
        return False
    return True


def types(app: Sphinx, domain: str, objtype: str, content: nodes.Element) -> None:
    """Gives what is listed as attributes the types of the annotations, and puts the types of returns beside these."""
    if domain != "py":
        return
    signature = content.parent[0]
    full = f"{signature.get('module')}.{signature.get('fullname')}"
    known = app.env.temp_data.get("annotations", {}).get(full, {})
    for fields in content.findall(nodes.field_list):
        named = {field[0].astext().partition(" ")[0]: field for field in fields}
        if {"returns", "rtype"} <= set(named):
            fields.remove(named["rtype"])
            fields.insert(fields.index(named["returns"]) + 1, named["rtype"])
        for field in list(fields):
            kind, _, name = field[0].astext().partition(" ")
            if kind == "ivar" and name in known:
                fields += nodes.field(
                    "", nodes.field_name("", f"vartype {name}"),
                    nodes.field_body("", nodes.paragraph("", known[name])),
                )  # fmt: skip


def setup(app: Sphinx) -> dict[str, Any]:
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"
    app.connect("autodoc-before-process-signature", operator)
    app.connect("autodoc-process-docstring", before, priority=400)  # Napoleon's is 500
    app.connect("autodoc-process-docstring", after, priority=900)
    app.connect("object-description-transform", types, priority=900)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
