"""Generated texts over HTTP: those of `generate`, whatever process dies meanwhile."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from multiworld_serving.cli.main import main
from multiworld_serving.testing.local_service import LocalService
from tests.chaos.clients import external_worker
from tests.decoders import expected_tokens, write_decoder
from tests.waiting import wait_until

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13, 14, 15], [20]]
COUNT = 60
MANY = 200


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("decoder")
    return folder, write_decoder(folder)


@pytest.fixture(scope="module")
def service(decoder: tuple[Path, Any]) -> Iterator[LocalService]:
    settings: dict[str, Any] = {
        "heartbeat_timeout_s": 10,
        "timeout_s": 200,
        "recovery_grace_s": 120,
        "hang_timeout_s": 60,
        "threads": 1,
    }
    with LocalService(model=f"chat=generate:{decoder[0]}", leaders=2, session_tokens=2000, **settings) as running:
        yield running


def words(text: str) -> list[int]:
    return [int(word[1:]) for word in text.split()]


def complete(service: LocalService, **fields: Any) -> httpx.Response:
    body = {"model": "chat", "prompt": PROMPTS[0], "max_tokens": 10, "temperature": 0} | fields
    return httpx.post(f"{service.url}/v1/completions", json=body, timeout=200)


def test_texts_are_those_of_generate_and_end_as_asked(service: LocalService, decoder: tuple[Path, Any]) -> None:
    expected = expected_tokens(decoder[1], PROMPTS[0], 10)
    answer = complete(service).json()
    assert words(answer["choices"][0]["text"]) == expected
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 10, "total_tokens": 13}
    assert complete(service, prompt="w5 w6 w7").json()["choices"] == answer["choices"]
    stopped = complete(service, stop=[f"w{expected[4]}"]).json()["choices"][0]
    at = expected.index(expected[4])
    assert (words(stopped["text"]), stopped["finish_reason"]) == (expected[:at], "stop")
    seeded = [complete(service, temperature=1.0, seed=seed).json()["choices"][0]["text"] for seed in (1, 1, 2)]
    assert seeded[0] == seeded[1] != seeded[2]


def test_chat_uses_the_template_and_models_are_listed(service: LocalService, decoder: tuple[Path, Any]) -> None:
    url = f"{service.url}/v1"
    assert [each["id"] for each in httpx.get(f"{url}/models").json()["data"]] == ["chat"]
    message = {"role": "w5", "content": [{"type": "text", "text": "w6"}]}
    body = {"model": "chat", "messages": [message], "max_completion_tokens": 5, "temperature": 0}
    answer = httpx.post(f"{url}/chat/completions", json=body, timeout=200).json()
    assert words(answer["choices"][0]["message"]["content"]) == expected_tokens(decoder[1], [5, 6, 1], 5)


@pytest.mark.parametrize(
    ("fields", "status", "named"),
    [
        ({"logprobs": 3}, 400, "logprobs"),
        ({"n": 2}, 400, "n"),
        ({"temperature": -1}, 400, "temperature"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [1] * 300}, 400, "300 tokens"),
        ({"model": "other"}, 404, "other"),
        ({"prompt": [5] * 200, "max_tokens": 56, "stream": True}, 200, "[DONE]"),
    ],
)
def test_requests_are_refused_with_the_name_of_the_field(
    fields: dict[str, Any], status: int, named: str, service: LocalService
) -> None:
    response = complete(service, **fields)
    assert response.status_code == status, response.text
    assert named in response.text


class FullError(Exception):
    """The service has no room for another sequence."""


def streamed(service: LocalService, prompt: list[int], most: int) -> Iterator[list[int]]:
    """The tokens of a greedy stream, as they come."""
    body = {"model": "chat", "prompt": prompt, "max_tokens": most, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{service.url}/v1/completions", json=body, timeout=200) as response:
        if response.status_code == 429:
            raise FullError
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                yield words(event["choices"][0]["text"])


@pytest.fixture(scope="module")
def client(service: LocalService) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key="unused", timeout=200, max_retries=0)


def test_the_client_of_openai_completes_and_chats(client: openai.OpenAI, decoder: tuple[Path, Any]) -> None:
    expected = expected_tokens(decoder[1], [5, 6, 7], 8)
    asked: dict[str, Any] = {"model": "chat", "temperature": 0, "max_tokens": 8}
    completion = client.completions.create(prompt="w5 w6 w7", **asked)
    assert (words(completion.choices[0].text), completion.choices[0].finish_reason) == (expected, "length")
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 8
    parts = list(client.completions.create(prompt=[5, 6, 7], stream=True, **asked))
    assert words("".join(each.choices[0].text for each in parts)) == expected
    messages: Any = [{"role": "w5", "content": "w6"}]
    chat = client.chat.completions.create(messages=messages, **asked)
    message, replied = chat.choices[0].message, expected_tokens(decoder[1], [5, 6, 1], 8)
    assert (message.role, words(message.content or "")) == ("assistant", replied)
    chunks = list(
        client.chat.completions.create(messages=messages, stream=True, stream_options={"include_usage": True}, **asked)
    )
    assert words("".join(each.choices[0].delta.content or "" for each in chunks[:-1])) == replied
    assert [each.choices[0].delta.role for each in chunks[:2]] == ["assistant", None]
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 11
    with (
        client.chat.completions.stream(messages=messages, **asked) as stream,
        pytest.raises(openai.LengthFinishReasonError) as end,
    ):
        stream.get_final_completion()
    assert words(end.value.completion.choices[0].message.content or "") == replied
    assert [each.id for each in client.models.list()] == ["chat"]


def test_errors_are_the_exceptions_of_the_client_of_openai(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "chat", "prompt": "w5"}
    with pytest.raises(openai.BadRequestError, match="logprobs"):
        client.completions.create(logprobs=2, **asked)
    with pytest.raises(openai.BadRequestError, match="300 tokens") as caught:
        client.completions.create(**asked | {"prompt": [5] * 300}, stream=True)
    assert (caught.value.type, caught.value.code) == ("invalid_input", "400")
    with pytest.raises(openai.NotFoundError, match="other"):
        client.completions.create(model="other", prompt="w5")


def test_predict_names_the_path_of_a_decoder(service: LocalService) -> None:
    response = httpx.post(f"{service.url}/predict", content=b"x")
    assert (response.status_code, "/v1/completions" in response.text) == (404, True)


def test_streams_lose_no_token_when_workers_and_a_leader_are_killed(
    service: LocalService, decoder: tuple[Path, Any]
) -> None:
    expected = [expected_tokens(decoder[1], prompt, COUNT) for prompt in PROMPTS]
    replays = service.metric("multiworld_session_replays_total")
    victims = [*list(service.worker_pids().values())[:2], service.child_pids("leader")[0]]
    found: list[list[int]] = [[] for _ in PROMPTS]
    for number, prompt in enumerate(PROMPTS):
        for tokens in streamed(service, prompt, COUNT):
            found[number] += tokens
            if len(found[number]) == 10 and victims:
                os.kill(victims.pop(), signal.SIGKILL)
    assert found == expected
    assert not victims
    assert service.metric("multiworld_session_replays_total") > replays


@pytest.fixture(scope="module")
def drained(decoder: tuple[Path, Any], token_file: Path) -> Iterator[LocalService]:
    """Two workers on host a, and two on host b. Each has room for two of the texts below."""
    model = f"generate:{decoder[0]}"
    settings: dict[str, Any] = {"external_workers": True, "token_file": token_file, "wait_until_ready": False}
    settings |= {
        "timeout_s": 200,
        "recovery_grace_s": 120,
        "heartbeat_timeout_s": 10,
        "session_tokens": 2 * (MANY + 15),
    }
    with ExitStack() as stack:
        service = stack.enter_context(LocalService(model=f"chat={model}", stages=2, replicas=2, **settings))
        for name in ("a-0", "a-1", "b-0", "b-1"):
            options = ("--advertise-host", name[0], "--allow", model)
            stack.enter_context(external_worker(service.join_address, name=name, options=options))
        service.wait_until_complete(200)
        yield service


@pytest.mark.parametrize("command", ["rolling-restart", "drain"])
def test_streams_lose_no_token_when_workers_leave_one_after_another(
    command: str, request: pytest.FixtureRequest, decoder: tuple[Path, Any]
) -> None:
    service: LocalService = request.getfixturevalue("drained" if command == "drain" else "service")
    service.wait_until_complete(200)
    expected = [expected_tokens(decoder[1], prompt, MANY) for prompt in PROMPTS]
    replays = service.metric("multiworld_session_replays_total")
    has_ended = threading.Event()

    def client(prompt: list[int], expected: list[int]) -> int:
        ended = 0
        while not has_ended.is_set():
            with suppress(FullError):
                assert [token for tokens in streamed(service, prompt, MANY) for token in tokens] == expected
                ended += 1
        return ended

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        clients = [pool.submit(client, *each) for each in zip(PROMPTS, expected, strict=True)]
        try:
            wait_until(lambda: service.metric("multiworld_generate_open") > 1)
            arguments = ["b"] if command == "drain" else []
            assert main([command, *arguments, "--url", service.metrics_url.removesuffix("/metrics")]) == 0
        finally:
            has_ended.set()
    assert sum(each.result() for each in clients)
    assert service.metric("multiworld_session_replays_total") > replays


def test_a_client_that_disconnects_frees_its_session(service: LocalService) -> None:
    body = {"model": "chat", "prompt": [5], "max_tokens": 250, "temperature": 1, "seed": 1, "stream": True}
    with httpx.stream("POST", f"{service.url}/v1/completions", json=body, timeout=200) as response:
        lines = response.iter_lines()  # httpx disconnects when it is dropped
        next(lines)
        assert service.metric("multiworld_generate_open") == 1
        assert service.metric("multiworld_generate_reserved_tokens") == 251
    wait_until(lambda: service.metric("multiworld_generate_open") == 0)
    assert service.metric("multiworld_generate_reserved_tokens") == 0
    many = [complete(service, prompt=[number + 1], max_tokens=240).status_code for number in range(10)]
    assert set(many) == {200}  # ten sessions together would not fit into 2,000 tokens
