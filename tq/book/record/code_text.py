"""What of a Python file runs: its text without comments, docstrings and empty lines, the same for every Python.

A result does not depend on the rest, so a better docstring does not make hours of training stale. Text is kept and
not tokens: since 3.12 an f-string is several tokens, and the hash would depend on the interpreter.
"""

from __future__ import annotations

import io
import tokenize
from collections.abc import Iterator

_LAYOUT = {tokenize.INDENT, tokenize.DEDENT, tokenize.NL, tokenize.COMMENT, tokenize.ENCODING, tokenize.ENDMARKER}


def _statements(text: str) -> Iterator[list[tokenize.TokenInfo]]:
    """Tokens of every logical line, without those of the layout."""
    line: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NEWLINE:
            yield line
            line = []
        elif token.type not in _LAYOUT:
            line.append(token)


def running(source: bytes) -> bytes:
    """The statements of a file, as they are written, in UTF-8; a statement that is a mere string counts as a docstring.

    ``SyntaxError`` or ``tokenize.TokenError`` for what is not Python.
    """
    text = source.decode("utf-8-sig").replace("\r\n", "\n")
    comments = {
        token.start[0]: token.start[1]
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    }
    lines, kept = text.split("\n"), []
    for tokens in _statements(text):
        if not tokens or all(token.type == tokenize.STRING for token in tokens):
            continue
        for number in range(tokens[0].start[0], tokens[-1].end[0] + 1):
            line = lines[number - 1][: comments.get(number)]
            # white space within a string over several lines counts, elsewhere at line ends it does not
            inside = any(t.start[0] <= number <= t.end[0] != t.start[0] for t in tokens)
            if inside or line.strip():
                kept.append(line if inside else line.rstrip())
    return "\n".join(kept).encode()
