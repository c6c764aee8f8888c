# Both processes in one image; compose.yaml runs it. The whole tree is built, so that what runs is what lies here.
#
#   docker build --tag cachedattention:local .
#   docker build --build-arg TORCH_INDEX=URL …     torch from an index that has its CPU build (its default build is CUDA's)
#   docker build --build-arg PYTHON_IMAGE=NAME …   another base: Debian with Python 3.11 or 3.12, and its venv module
ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/cachedattention
# First what takes long and seldom changes.
ARG TORCH_INDEX=
RUN /opt/cachedattention/bin/pip install ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} 'torch>=2.11'
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY systemd systemd
COPY docs docs
COPY shared shared
COPY kvd kvd
COPY inference_svc inference_svc
RUN /opt/cachedattention/bin/pip install --constraint constraints.txt '.[cuda,engine,tracing]'

FROM ${PYTHON_IMAGE}
# As cachedattention-sysusers.conf has them, with numbers that the host can be told: kvd's is the owner of the arena.
RUN groupadd --gid 10001 kvd && groupadd --gid 10002 inference \
 && groupadd --gid 10003 kvd-engine && groupadd --gid 10004 kvd-operator \
 && groupadd --gid 10005 kvd-reader && groupadd --gid 10006 inference-client \
 && useradd --uid 10001 --gid kvd --groups kvd-engine,kvd-operator,kvd-reader --no-create-home kvd \
 && useradd --uid 10002 --gid inference --groups kvd-engine,inference-client --no-create-home inference \
 && install --directory --owner=kvd --group=kvd --mode=0711 /run/kvd \
 && install --directory --owner=kvd --group=kvd --mode=0700 /var/lib/kvd /arena \
 && install --directory --owner=inference --group=inference --mode=0711 /run/inference-svc \
 && install --directory --owner=inference --group=inference --mode=0700 /var/lib/inference-svc
# On a GPU Triton makes what launches its kernels, with a C compiler; on a CPU the service compiles its own kernels.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ libc6-dev \
 && rm --recursive /var/lib/apt/lists/*
COPY --from=build /opt/cachedattention /opt/cachedattention
ENV PATH=/opt/cachedattention/bin:$PATH PYTHONUNBUFFERED=1
USER kvd
CMD ["kvd", "--help"]
