"""The store as a process: it starts, serves, and ends on a signal with status 0."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from loraplex.v1 import adapter_store_pb2 as pb
from loraplex.v1.adapter_store_pb2_grpc import AdapterStoreStub
from tests.adapter_store.samples import WIDTH, flux_layout, peft, write_adapter

# The store where the extra `bases` is not installed: whatever imports one of these fails.
WITHOUT_TORCH = """
import sys
sys.modules.update(dict.fromkeys(("torch", "diffusers", "transformers", "peft")))
from adapter_store.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.e2e
@pytest.mark.parametrize("program", [("-m", "adapter_store"), ("-c", WITHOUT_TORCH)], ids=["whole", "without torch"])
def test_the_process_serves_an_adapter_and_ends_on_sigterm(tmp_path: Path, program: tuple[str, str]):
    write_adapter(tmp_path / "root" / "sketch.safetensors", peft("transformer.proj_out", 4, WIDTH, 4))
    flags = ["--listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0", "--log-format=json"]
    flags += [f"--cache-dir={tmp_path / 'cache'}", f"--local-roots={tmp_path / 'root'}"]
    command = [sys.executable, *program, *flags]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    ) as store:
        assert store.stderr is not None
        lines = (json.loads(line) for line in store.stderr)
        address = next(line["address"] for line in lines if line["event"] == "serving")
        with grpc.insecure_channel(address) as channel:
            stub = AdapterStoreStub(channel)
            layout = stub.RegisterLayout(pb.RegisterLayoutRequest(layout=flux_layout().to_proto()))
            request = pb.FetchAdapterRequest(ref="sketch", layout_digest=layout.layout_digest)
            parts = list(stub.FetchAdapter(request))
        store.send_signal(signal.SIGTERM)
        rest = store.stderr.read()
        assert store.wait(timeout=30) == 0
    assert parts[0].header.rank == 4
    assert "sketch" not in rest
    assert "Traceback" not in rest
