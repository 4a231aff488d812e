"""Channel options: gRPC ignores a misspelt one in silence."""

from pathlib import Path

import pytest
from grpc._cython import cygrpc

from loraplex.channel import CLIENT_OPTIONS, SERVER_OPTIONS


@pytest.fixture(scope="module")
def core() -> bytes:
    """gRPC's compiled core, in which the name of every option stands."""
    return Path(cygrpc.__file__).read_bytes()


@pytest.mark.parametrize("name", sorted({name for name, _ in (*CLIENT_OPTIONS, *SERVER_OPTIONS)}))
def test_every_option_is_one_that_grpc_knows(core: bytes, name: str):
    assert name.encode() + b"\0" in core


def test_a_misspelt_option_would_be_found(core: bytes):
    assert b"grpc.keepalive_time_msec\0" not in core


def test_a_service_that_comes_back_is_noticed_within_a_second():
    assert dict(CLIENT_OPTIONS)["grpc.max_reconnect_backoff_ms"] <= 1000


def test_clients_do_not_ping_more_often_than_servers_allow():
    assert (
        dict(CLIENT_OPTIONS)["grpc.keepalive_time_ms"]
        >= dict(SERVER_OPTIONS)["grpc.http2.min_ping_interval_without_data_ms"]
    )
