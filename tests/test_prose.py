"""The words of the docs and of the program: rules of plain English, as patterns.

`prose_excused.txt` counts what is excused in each file. A count may only shrink: the test fails above and below it.
`python -m tests.test_prose` prints every finding and writes the present counts, so that a review sees each change.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXCUSED = Path(__file__).with_name("prose_excused.txt")
LONGEST = 25  # words; figures do not count
RULES = {
    "1 name the subject": (
        r"\b(?:whoever|somebody|nobody)\b"
        r"|(?:^|[.:;] |\b(?:that|and|or|but|so|than|if|as) )who\b(?!.*\?$)"
    ),
    "2 use the usual verb": (
        r"\b(?:is|are|was|were|be|been|being)(?: not| then| also)? told\b"
        r"|\b(?:hears?|heard|says?|said|minds|look(?:s|ed)(?! up| for))\b"
        r"|\bgoes\b(?! wrong)|\b(?:has|have|had|is|are|was|were) gone\b"
    ),
    "3 put the subject first": (
        r"^(?:What\b(?=.*\.$)|That (?:an?|the|no|every|each|its?|they|there)\b|Of (?!course\b))"
    ),
    "5 write directly": (
        r"\b(?:is|are|was|were) what\b|\bthere (?:is|are|was|were) none\b|\bfor want of\b|\bby now\b"
        r"|\bby (?:it|them)sel(?:f|ves)\b|\bhad better\b|\bin earnest\b"
    ),
}
PATTERNS = {rule: re.compile(pattern, re.IGNORECASE) for rule, pattern in RULES.items()}
# Code, examples of commands, and the tests that are written below each line of the contract.
LEFT_OUT = re.compile(
    r"^ *```.*?^ *```|^  (?:\w+/)*\w+\.py: [^\n]*$|^  later$|^ +(?:duly|\* \*) [^\n]*$", re.MULTILINE | re.DOTALL
)
MARKUP = {
    r"`[^`]*`(?:,? (?:and )?`[^`]*`)*": "code",
    r"!?\[([^\]]*)\]\([^)]*\)": r"\1",
    r"[*_]{1,2}(?=\w)|(?<=[\w.:?])[*_]{1,2}": "",
}
BLOCK = re.compile(r"\n(?= *(?:[-*] |\d+\. |[|├└▲│]|#|>|$))|\n *\n")
END = re.compile(r"(?<!e\.g|i\.e)(?<=[.!?])(?=\s)|(?<=[.!?][\")])(?=\s)")


def docs() -> list[Path]:
    """List the pages that people write; the reference is generated from the code."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").glob("[!.]*/*.md")]
    pages += (ROOT / "examples").rglob("*.md")
    return sorted(page for page in [*pages, ROOT / "bench" / "README.md"] if page.parent.name != "reference")


def code() -> list[Path]:
    return sorted((ROOT / "src").rglob("*.py"))


def sentences(text: str) -> Iterator[str]:
    """Give the sentences of Markdown: of paragraphs, list items, headings, and cells of tables."""
    text = LEFT_OUT.sub("", text)
    for pattern, plain in MARKUP.items():
        text = re.sub(pattern, plain, text)
    for block in BLOCK.split(text):
        for part in re.split(r"[|;]", block) if block.lstrip().startswith("|") else [block]:
            yield from filter(None, (each.strip() for each in END.split(" ".join(part.lstrip(" -*#>\n").split()))))


def strings(text: str) -> Iterator[str]:
    """Give the docstrings and messages of a module: every string of three words or more."""
    nodes = list(ast.walk(ast.parse(text)))
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            string = "".join(str(part.value) if isinstance(part, ast.Constant) else "code" for part in node.values)
        else:
            string = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if id(node) not in parts and len(string.split()) >= 3:
            yield string


def findings(file: Path) -> list[str]:
    """List what breaks a rule in a file: the rule and the sentence."""
    text = file.read_text("utf-8")
    found = []
    for sentence in (
        each for string in (strings(text) if file.suffix == ".py" else [text]) for each in sentences(string)
    ):
        found += [f"{rule}: {sentence}" for rule, pattern in PATTERNS.items() for _ in pattern.finditer(sentence)]
        if sum(word.lstrip("([\"'")[:1].isalpha() for word in sentence.split()) > LONGEST:
            found.append(f"3 at most {LONGEST} words: {sentence}")
    return found


@pytest.mark.parametrize("files", [docs, code])
def test_prose_is_plain(files):
    excused = {name: int(count) for count, name in map(str.split, EXCUSED.read_text("utf-8").splitlines())}
    assert [name for name in excused if not (ROOT / name).exists()] == []
    wrong = []
    for file in files():
        name, found = file.relative_to(ROOT).as_posix(), findings(file)
        if len(found) > excused.get(name, 0):
            wrong += [f"{name}: rule {each}" for each in found]
        elif len(found) < excused.get(name, 0):
            wrong.append(f"{name}: {len(found)} findings are left. Lower its count in {EXCUSED.name}.")
    assert not wrong, "\n".join(wrong)


def test_a_pattern_finds_what_breaks_its_rule():
    broken = ["Whoever asks gets it.", "It is told of it.", "What ends is kept.", "It stops by itself."]
    assert [sum(bool(pattern.search(each)) for pattern in PATTERNS.values()) for each in broken] == [1, 1, 1, 1]
    assert not any(pattern.search("A user who asks gets what there is.") for pattern in PATTERNS.values())


if __name__ == "__main__":
    every = {file.relative_to(ROOT).as_posix(): findings(file) for file in [*docs(), *code()]}
    print("\n".join(f"{name}: rule {each}" for name, found in every.items() for each in found))
    EXCUSED.write_text("".join(f"{len(found)} {name}\n" for name, found in every.items() if found), "utf-8")
