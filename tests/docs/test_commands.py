"""What the documents tell a reader to type does what they say, against live services."""

import re
from pathlib import Path

import pytest

from tests.docs.conftest import Workplace
from tests.docs.documents import DOCUMENTS, ROOT, Command, blocks, commands


def is_as_shown(shown: str, printed: str) -> bool:
    """Whether `printed` is what a document shows: `...` is any text, white space counts as one blank."""
    parts = (re.escape(" ".join(part.split())) for part in shown.split("..."))
    return re.fullmatch(".*".join(parts), " ".join(printed.split())) is not None


def _with(language: str) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in DOCUMENTS if any(blocks(path.read_text(), language))]


def _complaint(command: Command, document: str, workplace: Workplace) -> str:
    """What a reader would say who types the command; "" when all is as the document says."""
    done, shown = workplace.run(command.text), workplace.moved(command.output)
    if done.returncode:
        return f"{document}:{command.line}: $ {command.text}\nfails with {done.returncode}\n{done.stdout}"
    if not shown or is_as_shown(shown, done.stdout):
        return ""
    return f"{document}:{command.line}: $ {command.text}\nshows\n{shown}\nand printed\n{done.stdout}"


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("document", _with("console"))
def test_every_command_works_and_prints_what_is_shown(workplace: Workplace, document: str):
    typed = commands((ROOT / document).read_text())
    complaints = [_complaint(command, document, workplace) for command in typed]
    assert not any(complaints), "\n\n".join(filter(None, complaints))


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("document", _with("python"))
def test_every_python_block_runs(workplace: Workplace, document: str):
    for line, block in blocks((ROOT / document).read_text(), "python"):
        program = workplace.folder / "block.py"
        program.write_text(workplace.moved(block))
        done = workplace.run(f"python {program}")
        assert done.returncode == 0, f"{document}:{line}\n{done.stdout}"


def test_a_command_may_go_on_in_the_next_line_and_show_its_output():
    text = "a\n```console\n$ one \\\n  two\nout ...\n$ three\n```\n```sh\nnot this\n```\n"
    assert commands(text) == [Command(3, "one \\\n  two", "out ...\n"), Command(6, "three", "")]


def test_what_is_shown_may_leave_out_what_differs():
    assert is_as_shown("rank ... 4\n...\nlast", "rank   4\nsize  12\nlast\n")
    assert not is_as_shown("rank ... 4\nlast", "rank   4\nsize  12\nlast\n")


def test_the_documents_are_found():
    assert {"tutorial.md", "backends.md", "operations.md", "formats.md"} <= {Path(path).name for path in DOCUMENTS}
