"""Print the size of each package in lines of code, and fail if one is above its budget.

    python -m tests.size

A line of code is a line that is not blank and not only a comment or a docstring. Files that git tracks count once, also if a symbolic link
leads to them. The budgets are in pyproject.toml, `[tool.multiworld.budgets]`; `words` is the number of words in all Markdown files.
"""

import ast
import io
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def count_lines(source: str) -> int:
    """Return the number of lines of code."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                docstrings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NOT_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def main() -> int:
    """Print one line for each package; return 1 if a budget is exceeded."""
    tracked = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True, check=True).stdout
    size: Counter[str] = Counter()
    for file in (ROOT / name for name in tracked.split("\0") if name):
        if file.is_symlink() or not file.is_file():
            continue
        if file.suffix == ".py":
            size[file.relative_to(ROOT).parts[0]] += count_lines(file.read_text(encoding="utf-8"))
        elif file.suffix == ".md":
            size["words"] += len(file.read_text(encoding="utf-8").split())
    budgets = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["multiworld"]["budgets"]
    exceeded = sorted(name for name in size if size[name] > budgets.get(name, 0))
    for name in sorted(size, key=size.__getitem__, reverse=True):
        print(f"{name:20} {size[name]:6} of {budgets.get(name, 0):6}{'  TOO LARGE' if name in exceeded else ''}")
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
