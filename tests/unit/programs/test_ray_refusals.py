"""`multiworld serve --launcher ray` and `multiworld down` where they cannot work: one line that says what to do, within seconds."""

import socket
import sys
import threading

import pytest

from multiworld_serving.cli.main import main

SERVE = ["serve", "--launcher", "ray", "--weights", "random:0"]


def refusal(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    [line] = [line for line in capfd.readouterr().err.splitlines() if line.startswith("multiworld: error:")]
    return line


@pytest.mark.parametrize("verb", [SERVE, ["down"]])
def test_extra_is_named_when_ray_is_not_installed(
    verb: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'multiworld-serving[ray]'" in refusal(capfd, *verb)


class TestWithRay:
    @pytest.fixture(autouse=True)
    def ray(self) -> None:
        pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

    @pytest.mark.parametrize("address", ["nowhere", "ray://10.0.0.1:10001", "10.0.0.1"])
    def test_address_must_be_host_and_port(self, address: str, capfd: pytest.CaptureFixture[str]) -> None:
        assert f"--ray-address {address}: must be auto, or HOST:PORT" in refusal(
            capfd, "down", "--ray-address", address
        )

    @pytest.mark.parametrize("verb", [SERVE, ["down"]])
    def test_address_is_named_when_nobody_answers(self, verb: list[str], capfd: pytest.CaptureFixture[str]) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.2", 0))
            address = f"127.0.0.2:{unused.getsockname()[1]}"
            assert f"nothing answers at {address}" in refusal(capfd, *verb, "--ray-address", address)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--device", "cuda:1"], "Ray chooses the GPU of each worker"),
            (["--external-workers"], "the launcher ray starts the workers"),
        ],
    )
    def test_settings_of_one_machine_are_refused(
        self, options: list[str], message: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MULTIWORLD_TOKEN", "of-this-test")
        assert message in refusal(capfd, *SERVE, *options)

    def test_head_that_does_not_answer_is_given_up(
        self, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("multiworld_serving.deploy.ray.cluster._PROBE_S", 0.2)
        with socket.create_server(("127.0.0.2", 0)) as silent:
            address = f"127.0.0.2:{silent.getsockname()[1]}"
            assert f"nothing answers at {address}: timed out" in refusal(capfd, *SERVE, "--ray-address", address)

    def test_another_server_is_not_taken_for_a_cluster(self, capfd: pytest.CaptureFixture[str]) -> None:
        with socket.create_server(("127.0.0.2", 0)) as server:
            address = f"127.0.0.2:{server.getsockname()[1]}"

            def answer() -> None:
                connection, _ = server.accept()
                with connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

            thread = threading.Thread(target=answer)
            thread.start()
            assert f"what answers at {address} is not the head" in refusal(capfd, "down", "--ray-address", address)
            thread.join()
