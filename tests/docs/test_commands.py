"""What the documents tell a reader to type does what they say, against live services."""

import doctest
from pathlib import Path

import pytest

from tests.docs.conftest import Workplace
from tests.docs.documents import DOCUMENTS, ROOT, Command, blocks, commands

_LIKE_DOCTEST = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def _with(language: str) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in DOCUMENTS if any(blocks(path.read_text(), language))]


def _complaint(command: Command, output: str, document: str, workplace: Workplace) -> str:
    shown = workplace.moved(command.output)
    if not shown or doctest.OutputChecker().check_output(shown, output, _LIKE_DOCTEST):
        return ""
    return f"{document}:{command.line}: $ {command.text}\nshows\n{shown}\nand printed\n{output}"


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("document", _with("console"))
def test_every_command_works_and_prints_what_is_shown(workplace: Workplace, document: str):
    for command in commands((ROOT / document).read_text()):
        done = workplace.run(command.text)
        assert done.returncode == 0, f"{document}:{command.line}: $ {command.text}\n{done.stdout}"
        assert not (complaint := _complaint(command, done.stdout, document, workplace)), complaint


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("document", _with("python"))
def test_every_python_block_runs(workplace: Workplace, document: str):
    for line, block in blocks((ROOT / document).read_text(), "python"):
        program = workplace.folder / "block.py"
        program.write_text(block)
        done = workplace.run(f"python {program}")
        assert done.returncode == 0, f"{document}:{line}\n{done.stdout}"


def test_a_command_may_go_on_in_the_next_line_and_show_its_output():
    text = "a\n```console\n$ one \\\n  two\nout ...\n$ three\n```\n```sh\nnot this\n```\n"
    assert commands(text) == [Command(3, "one \\\n  two", "out ...\n"), Command(6, "three", "")]


def test_the_documents_are_found():
    assert {"tutorial.md", "backends.md", "operations.md", "formats.md"} <= {Path(path).name for path in DOCUMENTS}
