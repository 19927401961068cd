"""`python -m deploy.gpu_overlay N > docker-compose.gpu.yml`: the Compose overlay for a machine with N GPUs, one worker on each.

Compose gives all containers of a service the same devices, so that each GPU has a service of its own. They are printed, not drawn up
by hand, because they differ in a number only.
"""

import sys

HEAD = """\
# Made by `python -m deploy.gpu_overlay {gpus}`: one worker on each of {gpus} GPUs, {stages} stage{s} of {replicas} replicas.
#
#   docker compose -f docker-compose.yml -f docker-compose.gpu.yml up -d --wait
#
# Needs NVIDIA's driver and its container toolkit. GPU_0={{UUID or number}} and so on choose others than the first {gpus}.
# Never run on GPUs yet: docs/docker.md says what was tried. Batches travel between leader and workers over lines; what is set here
# of shared memory and limits is what NCCL wants where it is given more than one GPU of a machine.
x-gpu-worker: &gpu-worker
  extends: {{ file: docker-compose.yml, service: worker }}
  shm_size: ${{GPU_WORKER_SHM:-1g}}
  ulimits: {{ memlock: -1, stack: 67108864 }}
  mem_limit: ${{GPU_WORKER_MEMORY:-8g}}
  memswap_limit: ${{GPU_WORKER_MEMORY:-8g}}
  networks:
    worlds:
      aliases: [worker] # by which Prometheus finds them

services:
  leader:
    environment:
      MULTIWORLD_STAGES: ${{MULTIWORLD_STAGES:-{stages}}}
      MULTIWORLD_REPLICAS: ${{MULTIWORLD_REPLICAS:-{replicas}}}

  worker: # on the CPU: none, unless WORKERS says otherwise
    deploy:
      replicas: ${{WORKERS:-0}}
"""

WORKER = """
  worker-gpu-{gpu}:
    <<: *gpu-worker
    environment:
      MULTIWORLD_DEVICE: cuda:0 # the only one that it sees
      NCCL_SOCKET_IFNAME: ${{NCCL_SOCKET_IFNAME:-eth0}}
      NCCL_DEBUG: ${{NCCL_DEBUG:-WARN}}
    deploy:
      replicas: 1
      resources:
        reservations:
          devices:
            - driver: nvidia
              device_ids: ["${{GPU_{gpu}:-{gpu}}}"]
              capabilities: [gpu]
"""

MOST = 64


def overlay(gpus: int) -> str:
    """The overlay as YAML. Two replicas at least of each stage, so that a GPU may be lost; hence one stage only on two or three."""
    stages = 2 if gpus >= 4 else 1
    head = HEAD.format(gpus=gpus, stages=stages, s="s" if stages > 1 else "", replicas=gpus // stages)
    return head + "".join(WORKER.format(gpu=gpu) for gpu in range(gpus))


def main(arguments: list[str]) -> int:
    """Print it; 2 when it was not said for how many."""
    if len(arguments) != 1 or not arguments[0].isdigit() or not 1 <= int(arguments[0]) <= MOST:
        print(f"usage: python -m deploy.gpu_overlay N, from 1 to {MOST} GPUs", file=sys.stderr)  # noqa: T201
        return 2
    sys.stdout.write(overlay(int(arguments[0])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
