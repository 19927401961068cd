"""The metrics of the whole service, as any frontend serves them."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterable
from pathlib import Path

from multiworld_serving.server.errors import RequestRejected
from multiworld_serving.server.frontends.leader_link import LeaderLink
from multiworld_serving.server.frontends.leader_pool import LeaderPool
from multiworld_serving.server.frontends.link import LinkLostError
from multiworld_serving.server.frontends.messages import Scrape

_TIMEOUT_S = 3.0
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (.+)")


async def scrape_service(name: str, pool: LeaderPool, supervisor_file: Path | None = None) -> bytes:
    """Metrics of this frontend, of all leaders, and of the other frontends through the first leader that is connected.

    A process that does not reply in time is left out.

    Args:
        name: of this frontend.
        supervisor_file: file with the metrics of the supervisor, if there is one.
    """
    links = [link for link in pool.links if link.state is not None]
    found = await asyncio.gather(*(_scrape(link, others=link is links[0]) for link in links))
    own = [(name, pool.metrics.text().decode())]
    if supervisor_file is not None:
        with contextlib.suppress(OSError):
            own.append(("supervisor", supervisor_file.read_text()))  # noqa: ASYNC240 - a small file
    return merge_metrics([*own, *(each for texts in found for each in texts)]).encode()


async def _scrape(link: LeaderLink, *, others: bool) -> list[tuple[str, str]]:
    try:
        reply = await link.connected().call(Scrape(others), timeout_s=_TIMEOUT_S)
    except (LinkLostError, RequestRejected, TimeoutError):
        return []
    (_, own), *rest = reply.body.texts
    return [(link.label or str(link.address), own), *rest]


def merge_metrics(texts: Iterable[tuple[str, str]]) -> str:
    """Merge expositions in Prometheus' text format.

    Args:
        texts: name of a process, and its metrics.
    """
    families: dict[str, list[str]] = {}
    for process, text in texts:
        family = ""
        label = 'process="' + process.replace("\\", r"\\").replace('"', r"\"") + '"'
        for line in text.splitlines():
            if line.startswith("# HELP "):
                family = line.split(" ", 3)[2]
                families.setdefault(family, [line])
            elif line.startswith("# TYPE "):
                if len(families.setdefault(family, [])) == 1:
                    families[family].append(line)
            elif line and not line.startswith("#") and (match := _SAMPLE.fullmatch(line)) is not None:
                name, labels, value = match.groups()
                families.setdefault(family, []).append(f"{name}{{{label}{',' + labels if labels else ''}}} {value}")
    return "".join(f"{line}\n" for lines in families.values() for line in lines)
