# One image for leaders, frontends and workers, see docs/docker.md. Builds with the classic builder and with BuildKit.
#
#   BASE_IMAGE    any Debian-like image with Python 3.11 or newer
#   TORCH_INDEX   package index of torch and torchvision; the packages on PyPI support CPUs and CUDA GPUs and
#                 are large, the CPU-only packages of PyTorch's own index have a fifth of the size
ARG BASE_IMAGE=python:3.11-slim-bookworm

# The requirements, without the code: the cache key is these lists, not all of pyproject.toml.
FROM ${BASE_IMAGE} AS requirements
WORKDIR /requirements
COPY pyproject.toml ./
RUN python -c "\
import re, tomllib; \
file = tomllib.load(open('pyproject.toml', 'rb')); \
project = file['project']; \
extras = project['optional-dependencies']; \
needed = [*project['dependencies'], *extras['gpu'], *extras['grpc'], *extras['otel']]; \
torch = [one for one in needed if re.match('torch(vision)?\\W', one)]; \
lists = {'torch': torch, 'other': [one for one in needed if one not in torch], 'build': file['build-system']['requires']}; \
[open(name + '.txt', 'w').write('\n'.join(lines) + '\n') for name, lines in lists.items()]" \
    && rm pyproject.toml

# The code as an installed package: modules, metadata and the command `multiworld`.
FROM ${BASE_IMAGE} AS code
WORKDIR /code
COPY --from=requirements /requirements/build.txt ./
RUN python -m venv --without-pip /opt/multiworld \
    && python -m venv /tools \
    && /tools/bin/pip install --quiet --no-cache-dir --disable-pip-version-check --requirement build.txt wheel
COPY . .
RUN /tools/bin/pip wheel --quiet --no-deps --no-build-isolation --disable-pip-version-check --wheel-dir /wheel . \
    && /tools/bin/pip --python /opt/multiworld install --quiet --no-deps --no-index --disable-pip-version-check /wheel/*.whl

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="multiworld-serving" org.opencontainers.image.licenses="Apache-2.0"
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* \
    && groupadd --system --gid 10001 multiworld \
    && useradd --system --uid 10001 --gid multiworld --no-create-home --home-dir /tmp multiworld \
    && install -d -o multiworld -g multiworld /var/cache/multiworld /run/multiworld
# Install in one layer of the final stage: copying gigabytes between stages takes longer than installing them.
# uv downloads and unpacks in parallel. Triton is omitted: only torch.compile uses it, together with a compiler, which the image
# does not have, and it is a fifth of the size.
COPY --from=requirements /requirements /requirements
ARG TORCH_INDEX=
RUN python -m venv --without-pip /opt/multiworld \
    && python -m venv /tools \
    && /tools/bin/pip install --quiet --no-cache-dir --disable-pip-version-check uv \
    && echo 'triton; python_version < "3"' > /tools/overrides.txt \
    && set -- /tools/bin/uv pip install --quiet --no-cache --compile-bytecode --python /opt/multiworld --overrides /tools/overrides.txt \
    && "$@" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} --requirement /requirements/torch.txt \
    && "$@" --requirement /requirements/torch.txt --requirement /requirements/other.txt \
    && rm -rf /tools
COPY --from=code /opt/multiworld /opt/multiworld

# Read-only root file system and an unprivileged user: writable are only a volume and /tmp.
ENV PATH=/opt/multiworld/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/var/cache/multiworld \
    TORCH_HOME=/var/cache/multiworld/torch \
    TORCHINDUCTOR_CACHE_DIR=/var/cache/multiworld/inductor
WORKDIR /tmp
USER multiworld
# Frontend: HTTP API (8000), admin port (8002). Leader: join port (8001), metrics (8002). Worker: metrics (8003).
EXPOSE 8000 8001 8002 8003
# For `serve` and `frontend`. For a leader with --metrics-port 8002 use http://127.0.0.1:8002/healthz, for a worker with --metrics-port 8003
# http://127.0.0.1:8003/readyz.
HEALTHCHECK --interval=5s --timeout=4s --start-period=60s --retries=3 \
    CMD ["python", "-P", "-m", "multiworld_serving.deploy.health", "http://127.0.0.1:8000/healthz"]
ENTRYPOINT ["tini", "--", "multiworld"]
CMD ["serve", "--host", "0.0.0.0"]
