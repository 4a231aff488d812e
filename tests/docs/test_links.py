"""Links of the documents lead to files that exist and to headings that these have."""

from pathlib import Path

import pytest

from tests.docs.documents import DOCUMENTS, ROOT, anchors, links


def broken_links(path: Path) -> list[str]:
    """The links of a document that lead nowhere; those to other sites are not followed."""
    broken = []
    for link in links(path.read_text()):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        is_anchor = not anchor or (target.suffix == ".md" and anchor in anchors(target.read_text()))
        if not target.exists() or not is_anchor:
            broken.append(link)
    return broken


@pytest.mark.parametrize("document", [str(path.relative_to(ROOT)) for path in [*DOCUMENTS, ROOT / "README.md"]])
def test_every_link_resolves(document: str):
    assert broken_links(ROOT / document) == []


def test_a_link_to_nothing_is_found(tmp_path: Path):
    document = tmp_path / "a.md"
    document.write_text("# A heading, here\n[x](b.md) [y](#a-heading-here) [z](#nowhere) [w](a.md#a-heading-here)\n")
    assert broken_links(document) == ["b.md", "#nowhere"]
