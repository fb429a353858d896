# A worker. DEVICE chooses the extra of pyproject.toml: cpu or cuda. The host brings the driver; an image holds none.
# Where PyPI's torch brings CUDA libraries that a CPU node does not need, name the index of the small build:
#   --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
FROM python:3.11-slim-bookworm AS build
ARG DEVICE=cpu
ARG PIP_EXTRA_INDEX_URL=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python3 -m venv /opt/ablate
COPY pyproject.toml constraints.txt ./
COPY kernels kernels
COPY model model
COPY experiments experiments
COPY workers workers
COPY service service
RUN /opt/ablate/bin/python -m pip install --quiet --constraint constraints.txt ".[worker,${DEVICE}]"

FROM python:3.11-slim-bookworm
# torch.compile and generated kernels need a C++ compiler on the node.
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends g++ python3-dev >/dev/null \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --create-home --home-dir /var/lib/ablate ablate
COPY --from=build /opt/ablate /opt/ablate
ENV PATH=/opt/ablate/bin:$PATH PYTHONUNBUFFERED=1 ABLATE_HOME=/var/lib/ablate
USER 10001
WORKDIR /var/lib/ablate
CMD ["python", "-m", "workers.app"]
