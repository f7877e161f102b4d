"""Functions that write a state to a file and read it back bit for bit, and a command line: no source hash covers them.

A recording does not depend on how files look in which an interrupted run waits for its other half. In the place of such
a function the hashes see the text that it had when it was taken out, so recordings from before keep their hash. What
stands below ``if __name__ == "__main__"`` runs on no import, and is left out where a module got one later.
tests/book/test_kept_states.py sees that today's function gives back the same state as the text that stands in for it.
"""

from __future__ import annotations

import ast
from pathlib import Path

_SAVE = '''\
    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes ``state_dict`` to the file ``path``, whole or not at all: an interrupted save leaves the old file."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.{os.getpid()}.part")
        state = self.state_dict()
        try:
            with open(part, "wb") as file:
                torch.save({**state, "digest": digest(state)}, file)
                file.flush()
                os.fsync(file.fileno())  # or a power cut may leave the new name with nothing in it
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
'''

_LOAD = '''\
    def load(self, path: str | os.PathLike[str]) -> None:
        """Reads the state from the file ``path``; nothing in it is executed. A damaged one raises ``ValueError``."""
        content = io.BytesIO(Path(path).read_bytes())
        try:
            state = torch.load(content, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"{path} is no whole checkpoint ({content.getbuffer().nbytes} bytes): {error}") from error
        given = state.pop("digest", None) if isinstance(state, dict) else None
        if given is not None and given != digest(state):
            raise ValueError(f"{path} is no whole checkpoint ({content.getbuffer().nbytes} bytes): its digest differs")
        self.load_state_dict(state)
'''

# {file: {function: the text that stands in for it}}
STAND_INS = {
    "tq/train/model/loop.py": {"Trainer.save": _SAVE, "Trainer.load": _LOAD},
    "tq/train/checkpoint.py": {"__main__": ""},
}


def counted(path: Path) -> bytes:
    """The content of a file as hashes see it. A function that is not there any more has no stand-in either."""
    content = path.read_bytes()
    for file, functions in STAND_INS.items():
        if path.as_posix().endswith("/" + file):
            return replaced(content.decode(), functions).encode()
    return content


def replaced(source: str, functions: dict[str, str]) -> str:
    """A module's source with other texts for some of its functions and methods, named as ``Class.method``.

    ``__main__``: what stands below ``if __name__ == "__main__"``.
    """
    lines = source.splitlines(keepends=True)
    places: dict[str, ast.FunctionDef | ast.If] = {}
    for node in ast.parse(source).body:
        inside = [(f"{node.name}.", each) for each in node.body] if isinstance(node, ast.ClassDef) else [("", node)]
        places |= {owner + each.name: each for owner, each in inside if isinstance(each, ast.FunctionDef)}
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'" and not node.orelse:
            places["__main__"] = node
    for name in sorted(functions.keys() & places.keys(), key=lambda name: places[name].lineno, reverse=True):
        node = places[name]
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
        lines[first - 1 : node.end_lineno] = functions[name].splitlines(keepends=True)
    return "".join(lines)
