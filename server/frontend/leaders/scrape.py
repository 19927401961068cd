"""The metrics of the whole service, as any frontend serves them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

from multiworld_serving.common.metrics import merge_metrics
from multiworld_serving.common.service.errors import RequestRejected
from multiworld_serving.common.service.messages import Scrape
from multiworld_serving.common.wire.link import LinkLostError
from multiworld_serving.server.frontend.leaders.link import LeaderLink
from multiworld_serving.server.frontend.leaders.pool import LeaderPool
from multiworld_serving.server.frontend.observability.metrics import FrontendMetrics

_TIMEOUT_S = 3.0


async def scrape_service(
    name: str, pools: Sequence[LeaderPool], metrics: FrontendMetrics, supervisor_file: Path | None = None
) -> bytes:
    """Metrics of this frontend, of all leaders, and of the other frontends through the first leader that is connected.

    A process that does not reply in time is left out.

    Args:
        name: of this frontend.
        pools: the leaders of each model.
        metrics: of this frontend.
        supervisor_file: file with the metrics of the supervisor, if there is one.
    """
    links = [(pool.name, link) for pool in pools for link in pool.links if link.state is not None]
    found = await asyncio.gather(*(_scrape(model, link, others=link is links[0][1]) for model, link in links))
    own = [(name, "", (await metrics.scrape()).decode())]
    if supervisor_file is not None:
        with contextlib.suppress(OSError):
            own.append(("supervisor", "", supervisor_file.read_text()))  # noqa: ASYNC240 - a small file
    texts = [*own, *(each for texts in found for each in texts)]
    return (await asyncio.to_thread(merge_metrics, texts)).encode()


async def _scrape(model: str, link: LeaderLink, *, others: bool) -> list[tuple[str, str, str]]:
    try:
        reply = await link.connected().call(Scrape(others), timeout_s=_TIMEOUT_S)
    except (LinkLostError, RequestRejected, TimeoutError):
        return []
    (_, own), *rest = reply.body.texts
    return [(link.label or str(link.address), model, own), *((each, "", text) for each, text in rest)]
