# The service: API (the default command), background process (`python -m service.background`) and migration
# (`python -m service.store.migrate`). Settings come from the environment or from files below /run/secrets.
FROM python:3.11-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python3 -m venv /opt/ablate
COPY pyproject.toml constraints.txt ./
COPY kernels kernels
COPY model model
COPY experiments experiments
COPY workers workers
COPY service service
RUN /opt/ablate/bin/python -m pip install --quiet --constraint constraints.txt '.[service]' \
    && /opt/ablate/bin/python -m compileall -q /opt/ablate/lib

FROM python:3.11-slim-bookworm
RUN useradd --uid 10001 --create-home --home-dir /var/lib/ablate ablate
COPY --from=build /opt/ablate /opt/ablate
ENV PATH=/opt/ablate/bin:$PATH PYTHONUNBUFFERED=1 ABLATE_HOME=/var/lib/ablate ABLATE_HOST=0.0.0.0 MPLCONFIGDIR=/tmp
USER 10001
WORKDIR /var/lib/ablate
EXPOSE 8321
CMD ["python", "-m", "service.app"]
