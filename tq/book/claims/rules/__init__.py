"""Rules of verdicts. Each chapter's stand in the module of its name, with underscores, as `RULES`: claim -> rule.

A rule stands where its evidence is, which need not be the chapter that the table names for the claim. A chapter that is
not written yet may have rules already: formulas. Nothing else lists rules; a new chapter is a new module.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache

from tq.book.claims.ledger import Rule


def joined(modules: Mapping[str, Mapping[str, Rule]]) -> dict[str, Rule]:
    """All rules of these modules (name -> rules). A claim with two rules raises: none of them would be the one."""
    found: dict[str, Rule] = {}
    where: dict[str, str] = {}
    for module, rules in modules.items():
        for claim, rule in rules.items():
            if claim in found:
                raise ValueError(
                    f"{claim} has a rule in rules/{where[claim]}.py and one in rules/{module}.py; keep one"
                )
            found[claim], where[claim] = rule, module
    return found


@cache
def by_chapter() -> dict[str, dict[str, Rule]]:
    """{module: its rules}, of every module of this folder."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name: importlib.import_module(f"{__name__}.{name}").RULES for name in names}


@cache
def every() -> dict[str, Rule]:
    """claim -> its rule."""
    return joined(by_chapter())
