"""The compiled messages are those of worker.proto; both sides know the same methods."""

import subprocess
import sys
from pathlib import Path

import pytest

from examples.m3_serving.gateway import wire
from examples.m3_serving.gateway.wire import methods
from examples.m3_serving.gateway.wire import worker_pb2 as pb

FOLDER = Path(wire.__file__).parent
ROOT = FOLDER.parents[2]


def test_compiled_messages_are_those_of_the_proto(tmp_path):
    """Compared by their descriptors: the text around them depends on the compiler's version."""
    pytest.importorskip("grpc_tools")
    from google.protobuf import descriptor_pb2

    out = tmp_path / "set"
    proto = str((FOLDER / "worker.proto").relative_to(ROOT))
    command = ["grpc_tools.protoc", "-I", ".", f"--descriptor_set_out={out}", proto]
    subprocess.run([sys.executable, "-m", *command], check=True, cwd=ROOT)
    (compiled,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    kept = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(kept)
    for descriptor in (compiled, kept):
        descriptor.ClearField("source_code_info")
        for message in descriptor.message_type:
            for field in message.field:
                field.ClearField("json_name")
    assert kept == compiled, "run `make proto`"


def test_methods_are_the_services():
    service = pb.DESCRIPTOR.services_by_name["Worker"]
    assert service.full_name == methods.SERVICE
    names = {f"/{service.full_name}/{method.name}" for method in service.methods}
    assert names == {methods.GENERATE, methods.HEALTH}


def test_the_wire_loads_no_torch():
    """Started by folder, so that nothing else is imported."""
    script = (
        f"import sys; sys.path.append({str(ROOT / 'm3_serving')!r})\n"
        "import gateway.wire.client\n"
        "print(sorted({'torch', 'av', 'PIL', 'transformers', 'msa_kernels'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr
