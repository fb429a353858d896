# A worker. DEVICE chooses the extra of pyproject.toml: cpu or cuda. The driver comes from the host.
#   docker build -f docker/worker.Dockerfile --build-arg DEVICE=cuda -t ablate-worker-cuda .
# If PyPI's torch includes CUDA libraries that a CPU node does not need, use the index of the small build:
#   --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
ARG DEVICE=cpu

FROM ${PYTHON_IMAGE} AS code
WORKDIR /src
ENV PIP_NO_CACHE_DIR=1
COPY pyproject.toml ./
COPY requirements/install.py requirements/*.lock requirements/
RUN python3 requirements/install.py --only /tmp/build build
COPY src src
COPY kernels kernels
COPY model model
COPY experiments experiments
COPY workers workers
COPY service service
RUN /tmp/build/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /wheels .

FROM ${PYTHON_IMAGE} AS packages
# torch.compile and generated kernels need a C++ compiler on the node.
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends g++ python3-dev >/dev/null \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --create-home --home-dir /var/lib/ablate ablate
ARG DEVICE
ARG PIP_EXTRA_INDEX_URL=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Packages are gigabytes: a layer of their own, which a new version of the code does not change.
COPY pyproject.toml /opt/packages/
COPY requirements/install.py requirements/*.lock /opt/packages/requirements/
RUN python3 /opt/packages/requirements/install.py --packages /opt/ablate worker "${DEVICE}"

# A worker registers only as the class of its image: without a driver it fails, and does not register as cpu.
FROM packages AS worker-cpu
ENV ABLATE_NODE_CLASS=cpu

FROM packages AS worker-cuda
ENV ABLATE_NODE_CLASS=h200
RUN ln -s /opt/ablate/lib/python3.*/site-packages/nvidia/cu13/bin/nvcc /opt/ablate/bin/

FROM worker-${DEVICE:-cpu}
COPY --from=code /wheels /opt/packages/
RUN /opt/ablate/bin/pip install --quiet --no-index --no-deps /opt/packages/*.whl
ENV PATH=/opt/ablate/bin:$PATH PYTHONUNBUFFERED=1 ABLATE_HOME=/var/lib/ablate
USER 10001
WORKDIR /var/lib/ablate
# The age of a file: starting a program would disturb a measurement. The first start may compile for minutes.
HEALTHCHECK --interval=30s --timeout=5s --start-period=20m --retries=2 \
    CMD test -n "$(find "$ABLATE_HOME/alive" -mmin -2)"
CMD ["python", "-m", "ablate.workers.app"]
