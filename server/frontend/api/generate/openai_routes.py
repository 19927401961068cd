"""The routes /v1/completions, /v1/chat/completions and /v1/models, as clients of OpenAI's API expect them."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from multiworld_serving.common.service.errors import InvalidInputError, RequestRejected, WrongPathError
from multiworld_serving.server.frontend.api.generate.generation import Generation, Sampling
from multiworld_serving.server.frontend.api.generate.text_codec import TextCodec
from multiworld_serving.server.frontend.api.groups import ModelGroup, ModelGroups
from multiworld_serving.server.frontend.api.streams import StreamedResponse
from multiworld_serving.server.frontend.http.error_responses import openai_error
from multiworld_serving.server.frontend.http.open_request import OpenRequest
from multiworld_serving.server.frontend.http.route import client_timeout_s, route
from multiworld_serving.server.frontend.observability.metrics import FrontendMetrics
from multiworld_serving.server.frontend.observability.request_records import RequestRecord

logger = logging.getLogger(__name__)

_DEFAULT_TOKENS = 16
_MAX_STOPS = 4
_INCOMPLETE = "\ufffd"
"""Ends the text of tokens that end within a character."""

Stops = str | Annotated[list[str], Meta(max_length=_MAX_STOPS)] | None


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """`include_usage`: a last chunk has the numbers of tokens."""

    include_usage: bool = False


class _Body(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields that both requests have. `user` is ignored; other fields are refused."""

    model: str
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    seed: int | None = None
    stop: Stops = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Literal[1] = 1
    user: str = ""


class Completion(_Body, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A request to continue a prompt: a text, or tokens."""

    prompt: str | Annotated[list[int], Meta(min_length=1)]


class TextPart(Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """A message of a conversation."""

    role: str
    content: str | list[TextPart]
    name: str = ""


class ChatCompletion(_Body, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A request for the next message of a conversation."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None


class _Piece(NamedTuple):
    """A part of the text, and why it ends: "stop", "length", or "" if it goes on. The first one of a chat has the role."""

    text: str
    finish: str = ""
    is_first: bool = False


class OpenAiRoutes:
    """The routes and their dependencies."""

    def __init__(self, groups: ModelGroups, metrics: FrontendMetrics) -> None:
        self._groups = groups
        self._metrics = metrics
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        """The routes."""
        return [
            route("/v1/completions", self._complete, "POST"),
            route("/v1/chat/completions", self._chat, "POST"),
            route("/v1/models", self._models),
        ]

    async def _models(self, _: Request) -> Response:
        models = [
            {"id": group.name, "object": "model", "created": self._created, "owned_by": "multiworld"}
            for group in self._groups
            if group.codec is not None
        ]
        return JSONResponse({"object": "list", "data": models})

    async def _complete(self, request: Request) -> Response:
        def tokens(asked: Completion, codec: TextCodec) -> list[int]:
            return codec.encode(asked.prompt) if isinstance(asked.prompt, str) else asked.prompt

        return await self._answer(request, Completion, tokens, "text_completion", _text_choice, _text_choice)

    async def _chat(self, request: Request) -> Response:
        def tokens(asked: ChatCompletion, codec: TextCodec) -> list[int]:
            texts = (
                each.content if isinstance(each.content, str) else "".join(part.text for part in each.content)
                for each in asked.messages
            )
            messages = [{"role": each.role, "content": text} for each, text in zip(asked.messages, texts, strict=True)]
            return codec.chat(messages)

        return await self._answer(request, ChatCompletion, tokens, "chat.completion", _message_choice, _delta_choice)

    async def _answer(
        self,
        request: Request,
        kind: Any,
        tokens_of: Callable[[Any, TextCodec], list[int]],
        name: str,
        choice: Callable[[_Piece], dict[str, Any]],
        chunk: Callable[[_Piece], dict[str, Any]],
    ) -> Response:
        record = RequestRecord.of(request.scope)
        async with AsyncExitStack() as stack:
            asked, group, codec, opened = await self._opened(request, kind, record, stack)
            inference = group.described()
            prompt = await inference.threads.run(lambda: tokens_of(asked, codec))
            wanted = getattr(asked, "max_completion_tokens", None) or asked.max_tokens
            most = min(wanted or _DEFAULT_TOKENS, codec.context - len(prompt))
            if not prompt or most < 1:
                raise InvalidInputError(f"the prompt has {len(prompt)} tokens; expected 1 to {codec.context - 1}")
            seed = secrets.randbits(62) if asked.seed is None else asked.seed % (1 << 62)
            sampling = Sampling(asked.temperature, asked.top_p, seed)
            generation = Generation(
                *(group.pool, opened, prompt, most, sampling),
                lambda cause: self._metrics.replays.labels(group.name, cause).inc(),
            )
            stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
            counted = _Counted(generation, self._metrics, group.name, record)
            pieces = _pieces(counted, codec, stops)
            opened.predicts = True
            head = {"id": f"cmpl-{record.request_id}", "created": int(time.time()), "model": asked.model}
            if asked.stream:
                object_name = name + (".chunk" if name.startswith("chat") else "")
                include = asked.stream_options is not None and asked.stream_options.include_usage
                events = _events(pieces, head | {"object": object_name}, chunk, counted, len(prompt), include)
                return StreamedResponse(events, stack.pop_all(), opened, _failure)
            async with aclosing(pieces):
                found = [piece async for piece in pieces]
            whole = _Piece("".join(each.text for each in found), found[-1].finish)
            usage = _usage(len(prompt), counted.count)
            return JSONResponse(head | {"object": name, "choices": [choice(whole)], "usage": usage})
        raise AssertionError("the block returns or raises")

    async def _opened(self, request: Request, kind: Any, record: RequestRecord, stack: AsyncExitStack) -> Any:
        """The parsed request, its model, and the open request, which `stack` closes."""
        some = next((group for group in self._groups if group.codec is not None), None)
        if some is None:
            raise WrongPathError("no model of this service generates text; serve one with --model NAME=generate:FOLDER")
        gate, timeout_s = some.described().gate, client_timeout_s(request)
        opened = await stack.enter_async_context(OpenRequest(gate, record, request.receive, timeout_s))
        body = await opened.body(request)
        try:
            asked = msgspec.json.decode(body, type=kind)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise InvalidInputError(f"the request is invalid: {error}") from error
        opened.release()
        group: ModelGroup = self._groups.choose(record, request.scope, asked.model)
        codec = group.codec
        if codec is None:
            raise WrongPathError(f"the model {asked.model!r} does not generate text")
        permitted = group.described().open_http(request)  # raises ForbiddenError
        if group is not some:
            await stack.aclose()
            opened = await stack.enter_async_context(permitted)
        await opened.admit()
        return asked, group, codec, opened


class _Counted:
    """The tokens of a generation, with their metrics."""

    def __init__(self, generation: Generation, metrics: FrontendMetrics, model: str, record: RequestRecord) -> None:
        self._generation = generation
        self._metrics = metrics
        self._model = model
        self._record = record
        self.count = 0

    async def tokens(self) -> AsyncGenerator[int, None]:
        generation, metrics, model = self._generation, self._metrics, self._model
        last_s = self._record.started_s
        metrics.open_streams.labels(model).inc()
        metrics.reserved_tokens.labels(model).inc(generation.capacity)
        try:
            async with aclosing(generation.tokens()) as tokens:
                async for token in tokens:
                    now_s = time.monotonic()
                    histogram = metrics.between_tokens_s if self.count else metrics.first_token_s
                    histogram.labels(model).observe(now_s - last_s)
                    last_s, self.count = now_s, self.count + 1
                    metrics.tokens.labels(model).inc()
                    yield token
        finally:
            metrics.open_streams.labels(model).dec()
            metrics.reserved_tokens.labels(model).dec(generation.capacity)


async def _pieces(counted: _Counted, codec: TextCodec, stops: list[str]) -> AsyncGenerator[_Piece, None]:
    """The text in pieces, of which none ends within a character or within what may become a stop. The last one has a reason."""
    tokens: list[int] = []
    sent, longest = 0, max(map(len, stops), default=1) - 1
    async with aclosing(counted.tokens()) as found:
        async for token in found:
            if token in codec.ends:
                yield _Piece(codec.decode(tokens)[sent:], "stop")
                return
            tokens.append(token)
            text = codec.decode(tokens)
            if ends := [at for stop in stops if stop and (at := text.find(stop, max(0, sent - longest))) >= 0]:
                yield _Piece(text[sent : max(sent, min(ends))], "stop")
                return
            safe = len(text) - longest if not text.endswith(_INCOMPLETE) else sent
            if safe > sent:
                yield _Piece(text[sent:safe])
                sent = safe
    yield _Piece(codec.decode(tokens)[sent:], "length")


def _usage(prompt: int, generated: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def _text_choice(piece: _Piece) -> dict[str, Any]:
    return {"index": 0, "text": piece.text, "logprobs": None, "finish_reason": piece.finish or None}


def _message_choice(piece: _Piece) -> dict[str, Any]:
    message = {"role": "assistant", "content": piece.text}
    return {"index": 0, "message": message, "logprobs": None, "finish_reason": piece.finish or None}


def _delta_choice(piece: _Piece) -> dict[str, Any]:
    delta = {"role": "assistant", "content": piece.text} if piece.is_first else {"content": piece.text}
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": piece.finish or None}


async def _events(
    pieces: AsyncGenerator[_Piece, None],
    head: Mapping[str, Any],
    chunk: Callable[[_Piece], dict[str, Any]],
    counted: _Counted,
    prompt: int,
    include_usage: bool,
) -> AsyncGenerator[bytes, None]:
    """The chunks of a stream as server-sent events."""
    async with aclosing(pieces):
        is_first = True
        async for piece in pieces:
            yield _event({**head, "choices": [chunk(piece._replace(is_first=is_first))]})
            is_first = False
    if include_usage:
        yield _event({**head, "choices": [], "usage": _usage(prompt, counted.count)})
    yield b"data: [DONE]\n\n"


def _event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def _failure(error: RequestRejected) -> bytes:
    """The last event, which says why the stream ends."""
    return _event({"error": openai_error(error.status, error.detail, error.reason)})
