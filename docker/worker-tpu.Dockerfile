# A worker of the TPU lane: compiles for TPU v6e without one (the default), or runs on the chips of its machine.
#   docker build -f docker/worker-tpu.Dockerfile -t ablate-worker-tpu .
#   docker run -e ABLATE_URL=... -v KEY:/run/secrets/ablate_worker_token:ro ablate-worker-tpu
#   on a TPU VM also: --privileged -e ABLATE_NODE_CLASS=tpu-v6e
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
FROM ${PYTHON_IMAGE}

# gcc, binutils: build stand-ins for CUDA's libraries if only PyPI's CUDA build of torch is available; git: the commit;
# libpython: torch_xla loads it
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends gcc libc6-dev binutils git libpython3.11 >/dev/null \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/ablate
COPY pyproject.toml README.md ./
COPY requirements requirements
COPY src src
COPY kernels kernels
COPY model model
COPY experiments experiments
COPY workers workers
# rejects versions other than the lock's, and a libtpu that cannot read the kernels
RUN PJRT_DEVICE=CPU JAX_PLATFORMS=cpu PIP_NO_CACHE_DIR=1 python3 requirements/install_tpu.py .venv-tpu

RUN useradd --uid 10001 --create-home --home-dir /var/lib/ablate ablate
ENV PATH=/opt/ablate/.venv-tpu/bin:$PATH PYTHONUNBUFFERED=1 ABLATE_HOME=/var/lib/ablate ABLATE_NODE_CLASS=tpu-v6e-compile
USER 10001
WORKDIR /var/lib/ablate
# As in worker.Dockerfile.
HEALTHCHECK --interval=30s --timeout=5s --start-period=20m --retries=2 \
    CMD test -n "$(find "$ABLATE_HOME/alive" -mmin -2)"
CMD ["python", "-m", "ablate.workers.app"]
