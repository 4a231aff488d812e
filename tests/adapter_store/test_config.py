"""Settings: a field is a flag is a variable, and a wrong value stops the start and names itself."""

from pathlib import Path

import pytest

from adapter_store.config import StoreSettings
from loraplex.serving import load_settings


def load(*argv: str) -> StoreSettings:
    return load_settings(StoreSettings, argv, prog="store")


def test_the_defaults_listen_on_loopback_only():
    settings = load()
    assert (settings.listen, settings.metrics_listen) == ("127.0.0.1:50051", "127.0.0.1:9451")
    assert settings.cache_dir.is_absolute()
    assert settings.local_roots == ()


@pytest.mark.parametrize("form", ["{a},{b}", '["{a}", "{b}"]'])
def test_local_roots_are_a_list_from_a_flag_and_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
):
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir()
    b.mkdir()
    text = form.format(a=a, b=b)
    assert load("--local-roots", text).local_roots == (a, b)
    assert load(f"--local-roots={text}").local_roots == (a, b)
    monkeypatch.setenv("LORAPLEX_STORE_LOCAL_ROOTS", text)
    assert load().local_roots == (a, b)
    assert load("--local-roots", str(b)).local_roots == (b,)


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--cache-bytes", "0"], "--cache-bytes"),
        (["--max-rank", "many"], "--max-rank"),
        (["--local-roots", "/no/such/folder"], "--local-roots"),
        (["--local-roots", "[1"], "--local-roots"),
        (["--nonsense", "1"], "nonsense"),
        (["--https-hosts", "https://h.org"], "--https-hosts"),
        (["--https-private-hosts", "h.org/a"], "--https-private-hosts"),
        (["--https-ca-file", "/no/such/file"], "--https-ca-file"),
        (["--fsspec-roots", "bucket"], "--fsspec-roots"),
        (["--fsspec-roots", "https://h.org/a"], "--fsspec-roots"),
        (["--fsspec-roots", "memory://a/../b"], "--fsspec-roots"),
        (["--download-cache-bytes", "-1"], "--download-cache-bytes"),
    ],
)
def test_a_wrong_value_stops_the_start_and_is_named(capsys: pytest.CaptureFixture[str], argv: list[str], word: str):
    with pytest.raises(SystemExit) as stopped:
        load(*argv)
    assert stopped.value.code == 2
    assert word in capsys.readouterr().err


def test_help_shows_the_flag_and_the_variable(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        load("--help")
    shown = capsys.readouterr().out
    assert "--resolve-ttl-s" in shown
    assert "LORAPLEX_STORE_RESOLVE_TTL_S" in shown


def test_hosts_and_roots_are_lists_in_one_form():
    settings = load("--https-hosts", "H.org:443, i.org:8443", "--fsspec-roots", "memory://a,memory://b/c/")
    assert settings.https_hosts == ("h.org", "i.org:8443")
    assert settings.fsspec_roots == ("memory://a/", "memory://b/c/")


def test_nothing_but_the_hub_and_folders_is_allowed_by_default():
    settings = load()
    assert (settings.https_hosts, settings.https_private_hosts, settings.fsspec_roots) == ((), (), ())
