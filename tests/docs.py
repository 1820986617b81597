"""What README.md and walkthrough.md quote, made true: python tests/docs.py --fix

Without --fix it says which of the two is out of date. Four things are kept:

    [`name`](file#L1)               the line where the file defines that name (Class.method for methods)
    ```python from=FILE#NAME        lines of that definition: found by the first one, which has to be unique in it
    ```text lab=NAME                what `python nanoserve.py lab NAME` prints, but for the seconds on this machine
    | [file](file) | 123 |          its lines of code
"""

import ast
import io
import re
import sys
import tokenize
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
FILES = ("README.md", "walkthrough.md")


def count_code(path):
    """Lines with a token that is neither comment nor docstring; for kernels.cu, that are not comments."""
    text = path.read_text("utf-8")
    if path.suffix == ".cu":
        return sum(line.strip() != "" and not line.strip().startswith("//") for line in text.splitlines())
    lines, previous = set(), tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER):
            previous = previous if token.type in (tokenize.COMMENT, tokenize.NL) else token.type
            continue
        docstring = token.type == tokenize.STRING and previous in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        if not docstring:
            lines.update(range(token.start[0], token.end[0] + 1))
        previous = token.type
    return len(lines)


@lru_cache(maxsize=None)
def definition(file, name):
    """Lines [first, last] of a definition, from 1. Raises KeyError if the file has none of that name."""
    text = (ROOT / file).read_text("utf-8")
    if file.endswith(".cu"):
        lines = text.splitlines()
        for i, line in enumerate(lines):
            if re.search(rf"(\b(__global__|struct)\b.*|^\s+)\b{name}\b( \{{|\()", line) and not line.lstrip().startswith("//"):
                return i + 1, next(j for j in range(i, len(lines)) if lines[j].startswith("}")) + 1
        raise KeyError(f"{file} defines no {name}")
    body, node = ast.parse(text).body, None
    for part in name.split("."):
        node = next((n for n in body if getattr(n, "name", None) == part), None)
        if node is None:
            raise KeyError(f"{file} defines no {name}")
        body = node.body if hasattr(node, "body") else []
    return node.lineno, node.end_lineno


def excerpt(file, name, quoted):
    """The lines of a definition that begin with the first line of `quoted`, as many as it has."""
    first, last = definition(file, name)
    lines = (ROOT / file).read_text("utf-8").splitlines()[first - 1:last]
    wanted = quoted.splitlines()
    found = [i for i, line in enumerate(lines) if line == wanted[0]]
    if len(found) != 1:
        raise KeyError(f"{file}#{name}: {len(found)} lines are {wanted[0]!r}")
    return "".join(f"{line}\n" for line in lines[found[0]:found[0] + len(wanted)])


def lab_output(name):
    """What a lab prints."""
    import labs
    printed = []
    labs.run_labs(name, out=lambda *words: printed.extend(" ".join(map(str, words)).split("\n")))
    kept = [line for line in printed if not line.startswith(labs.SECONDS_HERE)]
    return "\n".join(kept).strip() + "\n"


def fixed(text):
    """The text of a document with all that it quotes brought up to date."""
    text = re.sub(r"(\[`([\w.]+)`\]\()([\w./]+)#L\d+", lambda m: f"{m[1]}{m[3]}#L{definition(m[3], m[2])[0]}", text)
    text = re.sub(r"(^```\w+ from=([\w./]+)#([\w.]+)\n)(.*?)(^```$)", lambda m: m[1] + excerpt(m[2], m[3], m[4]) + m[5], text,
                  flags=re.M | re.S)
    text = re.sub(r"(^```text lab=([\w-]+)\n).*?(^```$)", lambda m: m[1] + lab_output(m[2]) + m[3], text,
                  flags=re.M | re.S)
    return re.sub(r"(\| \[([\w./]+)\]\(\2\) \| )\d+", lambda m: f"{m[1]}{count_code(ROOT / m[2])}", text)


if __name__ == "__main__":
    for name in FILES:
        old = (ROOT / name).read_text("utf-8")
        new = fixed(old)
        print(f"{name}: {'up to date' if new == old else 'fixed' if '--fix' in sys.argv else 'out of date'}")
        if "--fix" in sys.argv:
            (ROOT / name).write_text(new, "utf-8")
