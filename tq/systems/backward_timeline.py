"""What is held for backward while it runs, node by node, when some values are stored and others are made again.

The rules are those of a step that runs (``tq.train.planned``), which counts the same bytes.
"""

from __future__ import annotations

from tq.systems.rematerialization import KEEP, Choice, Graph


def uses(graph: Graph, choice: Choice) -> list[int]:
    """How often each value is asked for: by backward, and by the operations that run again."""
    found = [0] * len(graph.values)
    for _, value in graph.asks:
        found[value] += 1
    for number in choice.again:
        for source in set(graph.operations[number].sources):
            found[source] += 1
    return found


def timeline(graph: Graph, choice: Choice, enough: float = float("inf")) -> list[int]:
    """Most bytes that are held for backward while it is given each value: what is stored, and what was made again.

    What runs again or is decoded is held until its last use. What is stored is let go when neither backward nor an
    operation that runs again will ask for it, after the node of backward that asked last.

    Args:
        enough: bytes; the first number beyond is the last that is returned.

    Raises:
        ValueError: the graph does not say in which order backward asks.
    """
    if not graph.asks:
        raise ValueError("the graph has no asks: trace a step with its backward pass")
    return _Timeline(graph, choice).run(enough)


class _Timeline:
    """Reference counts as the running step has them."""

    def __init__(self, graph: Graph, choice: Choice) -> None:
        self.graph, self.choice = graph, choice
        self.uses = uses(graph, choice)  # left in this pass
        self.holders = self.uses.copy()  # asks of backward, and operations that run again, that refer to it
        self.children = {n: sum(self.holders[v] > 0 for v in graph.made[n] if self._again(v)) for n in choice.again}
        self.bytes, self.most, self.cached = choice.nbytes, 0, set[int]()

    def _again(self, value: int) -> bool:
        return value not in self.choice.stored

    def _as_is(self, value: int) -> bool:
        way = self.choice.stored.get(value)
        return way is not None and self.graph.values[value].ways[way].name == KEEP

    def run(self, enough: float) -> list[int]:
        found, before, given = [], -1, list[int]()
        for node, value in self.graph.asks:
            if node != before:
                for each in given:
                    self._release(each)
                for each in given:
                    self._let_go(each)
                given, before = [], node
            self.most = 0
            self._take(value)
            given.append(value)
            found.append(max(self.most, self.bytes))
            if found[-1] > enough:
                break
        return found

    def _take(self, value: int) -> None:
        if not self._as_is(value) and value not in self.cached:
            self._make(value)
        self.uses[value] -= 1

    def _release(self, value: int) -> None:
        if value in self.cached and not self.uses[value]:
            self.cached.remove(value)
            self.bytes -= self.graph.values[value].nbytes

    def _make(self, value: int) -> None:
        made, sources = [value], dict[int, None]()
        if self._again(value):
            number = self.graph.values[value].operation
            sources = dict.fromkeys(self.graph.operations[number].sources)
            for source in sources:
                self._take(source)
            made = [v for v in self.graph.made[number] if self._again(v) and self.uses[v] and v not in self.cached]
        for each in made:
            self.cached.add(each)
            self.bytes += self.graph.values[each].nbytes
        self.most = max(self.most, self.bytes)
        for source in sources:
            self._release(source)

    def _let_go(self, value: int) -> None:
        self.holders[value] -= 1
        if self.holders[value]:
            return
        if not self._again(value):
            self.bytes -= self.graph.values[value].ways[self.choice.stored[value]].nbytes
            return
        number = self.graph.values[value].operation
        self.children[number] -= 1
        if not self.children[number]:
            for source in set(self.graph.operations[number].sources):
                self._let_go(source)
