"""The documents and what stands in them: fenced blocks, the commands of ```console blocks, links."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted((ROOT / "docs").rglob("*.md"))

_FENCE = re.compile(r"^```(?P<language>\S*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_PROMPT = "$ "


@dataclass(frozen=True)
class Command:
    """A command and the output that the document shows: none is any; `...` stands for any text, as in doctest."""

    line: int
    text: str
    output: str


def blocks(text: str, language: str) -> Iterator[tuple[int, str]]:
    """The fenced blocks of a language, with the number of their first line."""
    for match in _FENCE.finditer(text):
        if match["language"] == language:
            yield text.count("\n", 0, match.start()) + 2, match["text"]


def commands(text: str) -> list[Command]:
    """The commands of all ```console blocks, in order; a line that ends in a backslash goes on in the next one."""
    found: list[Command] = []
    for first, block in blocks(text, "console"):
        goes_on = False
        for number, line in enumerate(block.splitlines(), first):
            if line.startswith(_PROMPT):
                found.append(Command(number, line.removeprefix(_PROMPT), ""))
            elif goes_on:
                found[-1] = Command(found[-1].line, f"{found[-1].text}\n{line}", "")
            else:
                found[-1] = Command(found[-1].line, found[-1].text, f"{found[-1].output}{line}\n")
            goes_on = (line.startswith(_PROMPT) or goes_on) and line.endswith("\\")
    return found


def links(text: str) -> list[str]:
    """The targets of all links outside of fenced blocks."""
    return [match["target"] for match in _LINK.finditer(_FENCE.sub("", text))]


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
