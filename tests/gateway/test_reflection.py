"""A client without our code completes a request: it learns all message types from the server's reflection service."""

from __future__ import annotations

import json
import subprocess
import sys

from services.vllm import VLLM
from tests.gateway.harness import local_answer

STRANGER = """
import json, sys
import grpc
from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

channel = grpc.insecure_channel(sys.argv[1])
database = ProtoReflectionDescriptorDatabase(channel)
pool = descriptor_pool.DescriptorPool(database)
method = pool.FindServiceByName("smc.v1.GenerationService").methods_by_name["Generate"]
request = message_factory.GetMessageClass(method.input_type)()
sampling = {"method": "METHOD_SMC", "seed": "5", "particles": 4, "maxTokens": 20}
json_format.ParseDict({"tokenIds": {"ids": [7, 8, 9]}, "sampling": sampling}, request)
call = channel.unary_stream(
    f"/{method.containing_service.full_name}/{method.name}",
    request_serializer=lambda message: message.SerializeToString(),
    response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
)
responses = [json_format.MessageToDict(response) for response in call(request)]
assert not any(name.split(".")[0] in ("services", "smc") for name in sys.modules), "not a stranger"
print(json.dumps({"services": sorted(database.get_services()), "responses": responses}))
"""


def test_client_from_reflection_only(service, pair, tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", STRANGER, service.address], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    found = json.loads(ran.stdout)
    expected = local_answer(pair, [7, 8, 9], seed=5, method="smc", particles=4, max_tokens=20)
    assert tuple(token for response in found["responses"] for token in response.get("tokenIds", [])) == expected.tokens
    assert "".join(response.get("text", "") for response in found["responses"]) == expected.text
    finish = found["responses"][-1]["finish"]
    assert finish["seed"] == "5" and finish["reason"] == f"FINISH_REASON_{expected.finish_reason.upper()}"
    assert found["services"] == [
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "smc.v1.GenerationService",
        VLLM,
    ]
