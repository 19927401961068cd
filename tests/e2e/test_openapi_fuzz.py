"""schemathesis with the service's OpenAPI document: no generated request causes a server error or an undocumented answer."""

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx

from multiworld_serving.common.config.client_options import client_options
from multiworld_serving.common.config.keys import hash_key
from multiworld_serving.testing.load.images import photo
from tests.services import small_service

KEY = "key-of-the-fuzzer"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,ignored_auth"
UNENDING = "/events"
HONEST = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "4xx", 503, 504]
"""
"""Not ready, and the client's timeout exceeded: neither is a server error."""


def test_generated_requests_find_no_fault(tmp_path: Path) -> None:
    (tmp_path / "schemathesis.toml").write_text(HONEST)
    (tmp_path / "api.keys").write_text(f"fuzzer:{hash_key(KEY)}\n")
    command = [str(Path(sys.executable).with_name("schemathesis")), "--config-file", "schemathesis.toml", "run"]
    command += ["--header", f"Authorization: Bearer {KEY}", "--exclude-path", UNENDING, "--checks", CHECKS]
    command += ["--phases", "examples,coverage,fuzzing", "--max-examples", "4", "--generation-deterministic"]
    command += ["--continue-on-failure", "--request-timeout", "60", "--no-shrink", "--no-color"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    with small_service(
        credentials=client_options(KEY), api_keys_file=tmp_path / "api.keys", max_body_bytes=100_000, timeout_s=30
    ) as guarded:
        command.append(f"{guarded.url}/openapi.json")
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        selected = re.search(r"(\d+) selected", done.stdout)
        assert selected is not None
        assert int(selected[1]) >= 21
        assert not [line.message for line in guarded.lines if "exception" in line.fields]
        headers = {"content-type": "image/jpeg"} | guarded.credentials["headers"]
        assert httpx.post(f"{guarded.url}/predict", content=photo(), headers=headers, timeout=60).status_code == 200
        assert guarded.stop() == 0
