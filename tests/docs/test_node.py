"""The example for Node: against live services, and every detail of an error as Python decodes it."""

import base64
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from loraplex.errors import InvalidRequest, QueueFull, ServiceError
from loraplex.status import to_status
from tests.docs.conftest import Workplace
from tests.docs.documents import ROOT

NODE, NPM = shutil.which("node"), shutil.which("npm")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(not (NODE and NPM), reason="node and npm are not installed"),
]

_PRINT_EXPLAINED = """
const grpc = require('@grpc/grpc-js');
const { explain, isWorthARetry } = require('./errors');
const [, code, details, packed] = process.argv;
const metadata = new grpc.Metadata();
if (packed) metadata.set('grpc-status-details-bin', Buffer.from(packed, 'base64'));
const explained = explain({ code: Number(code), details, metadata });
console.log(JSON.stringify({ ...explained, isWorthARetry: isWorthARetry(explained) }));
"""


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with its packages, as its lock file pins them, beside the protos."""
    folder = tmp_path_factory.mktemp("node")
    shutil.copytree(ROOT / "protos", folder / "protos")
    example = folder / "examples/backend-node"
    shutil.copytree(ROOT / "examples/backend-node", example, ignore=shutil.ignore_patterns("node_modules"))
    command = [str(NPM), "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    installed = subprocess.run(command, cwd=example, capture_output=True, text=True, timeout=240)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    return example


def explained(example: Path, code: int, details: str, packed: bytes) -> dict[str, object]:
    """What the example makes of an error."""
    command = [str(NODE), "-e", _PRINT_EXPLAINED, str(code), details, base64.b64encode(packed).decode()]
    printed = subprocess.run(command, cwd=example, capture_output=True, text=True, timeout=60, check=True).stdout
    fields: dict[str, object] = json.loads(printed)
    return fields


def test_it_draws_and_shows_what_failures_look_like(workplace: Workplace, example: Path):
    done = workplace.run([str(NODE), str(example / "backend.js")])
    assert done.returncode == 0, done.stdout
    ready, *lines = done.stdout.splitlines()
    assert ready.startswith("adapter sketch: rank 16, READY_FROM_")
    assert sorted(lines[:4]) == ["12 steps done", *(f"preview after step {step}: true" for step in (12, 4, 8))]
    assert lines[4:] == [
        "backend-node.png, 12 steps, 0 recompilations",
        "NOT_FOUND ADAPTER_NOT_FOUND (field adapters[0].ref): "
        "No adapter 'no-such-adapter' in the store's local folders.",
        "INVALID_ARGUMENT INVALID_REQUEST (field prompt): The prompt is empty.",
        "CANCELLED: Cancelled on client",
    ]
    assert (workplace.folder / "backend-node.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("error", "is_worth_a_retry"),
    [
        (QueueFull("Full.", remedy="Come back.", retry_after_s=2.5), True),
        (InvalidRequest("Wrong.", field="adapters[0].strength", metadata={"more": "facts"}), False),
    ],
)
def test_every_detail_of_an_error_arrives(example: Path, error: ServiceError, is_worth_a_retry: bool):
    status = to_status(error, request_id="mine")
    fields = explained(example, status.code, status.message, status.SerializeToString())
    assert fields["code"] == error.code
    assert fields["reason"] == error.reason
    assert fields["message"] == error.message
    assert fields["remedy"] == error.remedy
    assert fields["field"] == error.field
    assert fields.get("retryAfterMs") == (error.retry_after_s and error.retry_after_s * 1000)
    assert fields["metadata"] == {
        **error.metadata,
        **({"remedy": error.remedy} if error.remedy else {}),
        "request_id": "mine",
    }
    assert fields["isWorthARetry"] is is_worth_a_retry


def test_an_error_of_grpc_itself_has_no_reason(example: Path):
    fields = explained(example, 14, "nobody there", b"")
    assert (fields["code"], fields["reason"], fields["isWorthARetry"]) == ("UNAVAILABLE", "", True)
