"""The Prometheus metrics of a frontend."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from multiworld_serving.common.metrics import ProgramMetrics
from multiworld_serving.common.service.snapshots import ServiceState
from multiworld_serving.server.frontend.observability.request_records import RequestRecorder

ReplayCause: TypeAlias = Literal["replica", "session"]
_TOKEN_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class FrontendMetrics(ProgramMetrics):
    """The counters and gauges of a frontend.

    Attributes:
        requests: records all requests.
    """

    def __init__(self) -> None:
        super().__init__()
        self.requests = RequestRecorder(self)
        self.connections = self.gauge("http_connections", "Open connections to the HTTP API.")
        self._leaders = self.gauge("leaders", "Leaders that this frontend can use.", ("model",))
        self._leaders_configured = self.gauge(
            "leaders_configured", "Leaders that this frontend was told of.", ("model",)
        )
        self._service_state = self.gauge(
            "service_state",
            "1 for the state of the service as this frontend sees it, 0 for the others.",
            ("model", "state"),
        )
        self._resubmitted = self.counter(
            "requests_resubmitted",
            "Requests that a frontend sent to another leader, by reason: failed = the leader failed, left = it stopped, or its workers "
            "left it; otherwise the reason of its rejection.",
            ("model", "reason"),
        )

        self.open_streams = self.gauge("generate_open", "Sequences that are generated now.", ("model",))
        self.reserved_tokens = self.gauge(
            "generate_reserved_tokens",
            "Tokens that these sequences reserve in each stage, prompts included.",
            ("model",),
        )
        self.tokens = self.counter("generated_tokens", "Tokens of generated texts.", ("model",))
        self.replays = self.counter(
            "session_replays",
            "Sessions that were computed again, by cause: replica = one was lost or drained, session = its worker did not have it.",
            ("model", "cause"),
        )
        self.first_token_s = self.histogram(
            "first_token_seconds", "Time from a request to its first token.", _TOKEN_BOUNDS_S, ("model",)
        )
        self.between_tokens_s = self.histogram(
            "between_tokens_seconds", "Time between two tokens of a text.", _TOKEN_BOUNDS_S, ("model",)
        )

    def group_state(self, model: str, leaders: int, configured: int, current: ServiceState) -> None:
        """Set the number of leaders of a model, and its state as this frontend sees it."""
        self._leaders.labels(model).set(leaders)
        self._leaders_configured.labels(model).set(configured)
        for state in get_args(ServiceState):
            self._service_state.labels(model, state).set(state == current)
        for reason in ("failed", "left"):  # Prometheus sees no increase if a series first appears with value 1
            self._resubmitted.labels(model, reason)

    def declare_generation(self, model: str) -> None:
        """Create the series of a model that generates text."""
        gauges = (self.open_streams, self.reserved_tokens)
        for each in (*gauges, self.tokens, self.first_token_s, self.between_tokens_s):
            each.labels(model)
        for cause in get_args(ReplayCause):
            self.replays.labels(model, cause)

    def resubmitted(self, model: str, reason: str) -> None:
        """A request is sent to another leader."""
        self._resubmitted.labels(model, reason).inc()
