"""`multiworld serve --launcher ray` and `multiworld down` where they cannot work: one line that says what to do, within seconds."""

import socket
import sys

import pytest

from tests.refusals import refusal

SERVE = ["serve", "--launcher", "ray", "--weights", "random:0"]


@pytest.mark.parametrize("verb", [SERVE, ["down"]])
def test_extra_is_named_when_ray_is_not_installed(
    verb: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'multiworld-serving[ray]'" in refusal(capfd, *verb)[-1]


class TestWithRay:
    @pytest.fixture(autouse=True)
    def ray(self) -> None:
        pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

    @pytest.mark.parametrize("address", ["nowhere", "ray://10.0.0.1:10001", "10.0.0.1"])
    def test_address_must_be_host_and_port(
        self, address: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert "RAY_ADDRESS must be HOST:PORT" in refusal(capfd, "down")[-1]

    @pytest.mark.parametrize("verb", [SERVE, ["down"]])
    def test_address_is_named_when_nobody_answers(
        self, verb: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.2", 0))
            address = f"127.0.0.2:{unused.getsockname()[1]}"
            monkeypatch.setenv("RAY_ADDRESS", address)
            assert f"nothing answers at {address}" in refusal(capfd, *verb)[-1]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--device", "cuda:1"], "Ray chooses the GPU of each worker"),
            (["--model", "resnet18@2=resnet18"], "serves one version of a model"),
            (["--external-workers"], "the launcher ray starts the workers"),
            (["--autoscale", "4..8"], "the launcher ray starts a fixed number of workers"),
        ],
    )
    def test_settings_of_one_machine_are_refused(
        self, options: list[str], message: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MULTIWORLD_TOKEN", "of-this-test")
        assert message in refusal(capfd, *SERVE, *options)[-1]
