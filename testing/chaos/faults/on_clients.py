"""Faults on the side of the clients. They must not affect any worker, nor other clients."""

import asyncio
from collections import Counter

import httpx

from multiworld_serving.testing.chaos.faults.fault import FaultContext, fault

CLIENTS = 32
DISCONNECT_AFTER_S = (0.005, 0.02, 0.05, 0.1)
DEADLINES_S = (0.001, 0.02, 0.05)


@fault("disconnect", f"{CLIENTS} additional clients disconnect during their request", "none")
def _disconnect(context: FaultContext) -> None:
    """Clients disconnect while their image is decoded, queued or computed."""

    async def disconnect() -> None:
        async with httpx.AsyncClient(**context.system.credentials) as client:
            for after_s in DISCONNECT_AFTER_S:
                requests = [asyncio.create_task(_post(client, context, {})) for _ in range(CLIENTS // 4)]
                await asyncio.sleep(after_s)
                for request in requests:
                    request.cancel()
                await asyncio.gather(*requests, return_exceptions=True)

    asyncio.run(disconnect())


@fault("deadline", f"{CLIENTS} additional requests with deadlines of 1 to 50 ms get 504", "none")
def _deadline(context: FaultContext) -> None:
    """The deadline of requests passes while their image is received, decoded, queued or computed."""

    async def ask() -> list[int]:
        async with httpx.AsyncClient(timeout=30.0, **context.system.credentials) as client:
            headers = ({"x-request-timeout-s": str(DEADLINES_S[n % len(DEADLINES_S)])} for n in range(CLIENTS))
            return await asyncio.gather(*(_post(client, context, header) for header in headers))

    # 408: the deadline passed before the body was received. 200: the service was fast enough.
    statuses = Counter(asyncio.run(ask()))
    if not statuses[504]:
        context.unexpected.append(f"no request with a short deadline got 504; statuses: {dict(statuses)}")
    elif others := {status: n for status, n in statuses.items() if status not in (504, 408, 200)}:
        context.unexpected.append(f"requests with short deadlines got {others}, expected 504")


async def _post(client: httpx.AsyncClient, context: FaultContext, headers: dict[str, str]) -> int:
    request = context.request
    headers = {**request.headers, **headers}
    answer = await client.post(context.system.url + request.path, content=request.body, headers=headers)
    return answer.status_code
