"""Which references lead where, and which lead nowhere."""

import os
from pathlib import Path

import pytest

from adapter_store.refs import AdapterRef, find_local, name_of
from loraplex.errors import AdapterNotFound, AmbiguousAdapter, InvalidAdapterRef
from tests.adapter_store.samples import peft, write_adapter


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", AdapterRef("hub", "org/name")),
        ("org/name@v1.0", AdapterRef("hub", "org/name", "v1.0")),
        ("org/name@refs/pr/3", AdapterRef("hub", "org/name", "refs/pr/3")),
        ("org/name:sub/a.safetensors", AdapterRef("hub", "org/name", "", "sub/a.safetensors")),
        ("org/name@main:a.safetensors", AdapterRef("hub", "org/name", "main", "a.safetensors")),
        ("sketch", AdapterRef("local", "sketch")),
        ("sketch.safetensors", AdapterRef("local", "sketch.safetensors")),
        ("styles/sketch.safetensors", AdapterRef("local", "styles/sketch.safetensors")),
        ("local:styles/sketch", AdapterRef("local", "styles/sketch")),
        ("a/b/c", AdapterRef("local", "a/b/c")),
        ("/data/loras/a", AdapterRef("local", "/data/loras/a")),
        ("/a", AdapterRef("local", "/a")),
    ],
)
def test_a_reference_is_read_and_written_back(text: str, expected: AdapterRef):
    assert AdapterRef.parse(text) == expected
    assert AdapterRef.parse(str(expected)) == expected
    assert "\n" not in repr(expected)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " a",
        "a\nb",
        "a\0b",
        "x" * 600,
        "../a",
        "a/../../b",
        "local:../a",
        "local:",
        "a\\b",
        "org/name@",
        "org/name:",
        "org/name:a.bin",
        "org/name:../a.safetensors",
        "org/name:/a.safetensors",
        "org/name@../x",
        "org/..",
        "org/na me",
        "a--b/c",
    ],
)
def test_what_is_no_reference_is_refused(text: str):
    with pytest.raises(InvalidAdapterRef) as refused:
        AdapterRef.parse(text)
    assert refused.value.field == "ref"
    assert refused.value.remedy


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path.resolve() / "root"
    for name in ("sketch", "folder/only", "several/a", "several/b", "deep/er/c"):
        write_adapter(root / f"{name}.safetensors", peft("a", 4, 4, 2))
    (root / "none").mkdir()
    write_adapter(root.parent / "outside.safetensors", peft("a", 4, 4, 2))
    return root


@pytest.mark.parametrize(
    ("text", "file"),
    [
        ("sketch", "sketch"),
        ("sketch.safetensors", "sketch"),
        ("folder", "folder/only"),
        ("local:folder/only", "folder/only"),
        ("deep/er/c", "deep/er/c"),
        ("{root}/sketch.safetensors", "sketch"),
        ("{root}/folder", "folder/only"),
    ],
)
def test_a_local_reference_leads_to_one_file(root: Path, text: str, file: str):
    path = find_local(AdapterRef.parse(text.format(root=root)), (root,))
    assert path == root / f"{file}.safetensors"
    name = name_of(path, (root,))
    assert name is not None
    assert find_local(AdapterRef.parse(name), (root,)) == path


def test_a_folder_of_several_files_lists_them(root: Path):
    with pytest.raises(AmbiguousAdapter, match=r"a\.safetensors, b\.safetensors"):
        find_local(AdapterRef.parse("several"), (root,))


@pytest.mark.parametrize("text", ["missing", "none", "local:folder/missing"])
def test_what_is_not_there_is_not_found(root: Path, text: str):
    with pytest.raises(AdapterNotFound):
        find_local(AdapterRef.parse(text), (root,))


def test_no_reference_leaves_the_roots(root: Path):
    (root / "link.safetensors").symlink_to(root.parent / "outside.safetensors")
    (root / "linked").symlink_to(root.parent)
    for text in ("link", "linked/outside.safetensors", f"{root.parent}/outside.safetensors", "/etc/passwd"):
        with pytest.raises(InvalidAdapterRef):
            find_local(AdapterRef.parse(text), (root,))
    assert name_of(root / "link.safetensors", (root,)) is None


def test_a_file_beside_a_folder_of_its_name_is_ambiguous_and_both_have_a_name_that_leads_back(root: Path):
    file = write_adapter(root / "folder.safetensors", peft("a", 4, 4, 2))
    with pytest.raises(AmbiguousAdapter, match=r"only\.safetensors") as refused:
        find_local(AdapterRef.parse("folder"), (root,))
    assert "`folder.safetensors`" in refused.value.remedy
    assert name_of(file, (root,)) == "folder.safetensors"
    assert name_of(root / "folder/only.safetensors", (root,)) == "local:folder/only"
    for path in (file, root / "folder/only.safetensors"):
        assert find_local(AdapterRef.parse(str(name_of(path, (root,)))), (root,)) == path


def test_a_folder_without_files_does_not_hide_the_file_of_its_name(root: Path):
    file = write_adapter(root / "none.safetensors", peft("a", 4, 4, 2))
    assert find_local(AdapterRef.parse("none"), (root,)) == file
    assert name_of(file, (root,)) == "none"


def test_a_file_that_another_hides_has_no_name_or_a_longer_one(root: Path, tmp_path: Path):
    other = tmp_path.resolve() / "other"
    hidden = write_adapter(other / "sketch.safetensors", peft("a", 4, 4, 2))
    longer = write_adapter(other / "folder.safetensors", peft("a", 4, 4, 2))
    doubled = write_adapter(root / "sketch.safetensors.safetensors", peft("a", 4, 4, 2))
    assert name_of(hidden, (root, other)) is None
    assert name_of(longer, (root, other)) == "folder.safetensors"
    assert name_of(doubled, (root, other)) == "sketch.safetensors.safetensors"


def test_a_link_that_leads_to_itself_is_not_found(root: Path):
    (root / "loop.safetensors").symlink_to(root / "loop.safetensors")
    (root / "circle").symlink_to(root / "circle")
    for text in ("loop", "circle", "local:circle/a"):
        with pytest.raises(AdapterNotFound):
            find_local(AdapterRef.parse(text), (root,))


def test_a_file_whose_name_is_no_text_is_named_in_messages_by_its_bytes(root: Path):
    odd = write_adapter(root / "odd/plain.safetensors", peft("a", 4, 4, 2))
    odd = odd.rename(Path(os.fsdecode(os.fsencode(odd.parent) + b"/bad\xffutf8.safetensors")))
    with pytest.raises(InvalidAdapterRef, match="renamed") as refused:
        find_local(AdapterRef.parse("odd"), (root,))
    assert r"bad\udcffutf8" in refused.value.message
    assert name_of(odd, (root,)) is None
    write_adapter(root / "odd/good.safetensors", peft("a", 4, 4, 2))
    with pytest.raises(AmbiguousAdapter) as ambiguous:
        find_local(AdapterRef.parse("odd"), (root,))
    ambiguous.value.message.encode()
    ambiguous.value.remedy.encode()


def test_the_first_root_wins(root: Path, tmp_path: Path):
    other = tmp_path.resolve() / "other"
    write_adapter(other / "sketch.safetensors", peft("a", 4, 4, 2))
    assert find_local(AdapterRef.parse("sketch"), (other, root)).parent == other
    assert find_local(AdapterRef.parse("folder"), (other, root)).parent.parent == root


@pytest.mark.parametrize(
    ("text", "expected", "written"),
    [
        ("https://Host.org/a/b.safetensors", AdapterRef("https", "https://host.org/a/b.safetensors"), None),
        ("HTTPS://h.org:8443/b.safetensors", AdapterRef("https", "https://h.org:8443/b.safetensors"), None),
        (
            "https://h.org/b.safetensors?sig=x&y=1",
            AdapterRef("https", "https://h.org/b.safetensors", query="sig=x&y=1"),
            "https://h.org/b.safetensors",
        ),
        ("s3://Bucket/some/Key.safetensors", AdapterRef("fsspec", "s3://Bucket/some/Key.safetensors"), None),
        ("memory://a b/ü.safetensors", AdapterRef("fsspec", "memory://a b/ü.safetensors"), None),
    ],
)
def test_a_url_is_a_reference_and_its_query_is_never_written(text: str, expected: AdapterRef, written: str | None):
    assert AdapterRef.parse(text) == expected
    assert str(AdapterRef.parse(text)) == (written or expected.name)
    assert "sig=" not in repr(AdapterRef.parse(text))


@pytest.mark.parametrize(
    "text",
    [
        "http://h.org/a.safetensors",
        "https://user:Secret@h.org/a.safetensors",
        "https://Secret@h.org/a.safetensors",
        "https://h.org/a.bin?Secret",
        "https://h.org/../a.safetensors?Secret",
        "https://h.org/%2e%2e/a.safetensors?Secret",
        "https://h.org/a.safetensors#x",
        "https://h.org",
        "https:///a.safetensors",
        "https://h_.org:99999999/a.safetensors",
        "https://[::1]/a.safetensors",
        "https://h.org\\@evil.org/a.safetensors",
        "https://h.org/a b.safetensors",
        "https://h.org/ü.safetensors",
        "file:///etc/a.safetensors",
        "local:///etc/a.safetensors",
        "s3://bucket/../other/a.safetensors",
        "s3://key:Secret@bucket/a.safetensors",
        "s3://bucket/a.safetensors?versionId=Secret",
        "simplecache::s3://bucket/a.safetensors",
        "s3://bucket/a.safetensors\n",
        " https://h.org/a.safetensors",
        "https://h.org/" + "a" * 5000 + ".safetensors",
        "://a.safetensors",
    ],
)
def test_what_is_no_url_of_an_adapter_is_refused_without_quoting_a_secret(text: str):
    with pytest.raises(InvalidAdapterRef) as refused:
        AdapterRef.parse(text)
    assert "Secret" not in f"{refused.value}"
    assert refused.value.remedy
