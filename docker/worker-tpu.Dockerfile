# Written and not built yet: nobody has started it.
# A worker of the TPU lane: compiles for TPU v6e where there is none (the default), or runs on the chips that it is given.
#   docker build -f docker/worker-tpu.Dockerfile -t ablate-worker-tpu .
#   docker run -e ABLATE_URL=... -e ABLATE_WORKER_TOKEN=... -e ABLATE_BROKER_URL=... ablate-worker-tpu
#   on a TPU VM also: --privileged -e ABLATE_NODE_CLASS=tpu-v6e
FROM python:3.11-slim-bookworm

# gcc, binutils: stand-ins for CUDA's libraries, where only PyPI's CUDA build of torch can be had; git: the commit's name
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev binutils git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/ablate
COPY pyproject.toml README.md ./
COPY requirements requirements
COPY kernels kernels
COPY model model
COPY experiments experiments
COPY workers workers
# refuses other versions than the lock's, and a libtpu that cannot read the kernels
RUN PJRT_DEVICE=CPU JAX_PLATFORMS=cpu PIP_NO_CACHE_DIR=1 python requirements/install_tpu.py .venv-tpu

RUN useradd --create-home ablate && mkdir /var/lib/ablate && chown ablate /var/lib/ablate
USER ablate
ENV ABLATE_HOME=/var/lib/ablate ABLATE_NODE_CLASS=tpu-v6e-compile
VOLUME /var/lib/ablate
ENTRYPOINT [".venv-tpu/bin/python", "-m", "workers.app"]
