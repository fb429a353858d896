# The service: API (the default command), background process (`python -m service.background.main`) and migration
# (`python -m service.store.migrate`). Settings come from the environment or from files below /run/secrets.
FROM python:3.11-slim-bookworm AS code
WORKDIR /src
COPY pyproject.toml ./
COPY kernels kernels
COPY model model
COPY experiments experiments
COPY workers workers
COPY service service
RUN python3 -m venv /tmp/pip && /tmp/pip/bin/pip wheel --quiet --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim-bookworm
RUN useradd --uid 10001 --create-home --home-dir /var/lib/ablate ablate
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Packages are a layer of their own, which a new version of the code does not change.
COPY pyproject.toml constraints.txt /opt/packages/
RUN python3 -m venv /opt/ablate && cd /opt/packages \
    && /opt/ablate/bin/pip install --quiet --constraint constraints.txt '.[service]' \
    && /opt/ablate/bin/pip uninstall --quiet --yes ablate
COPY --from=code /wheels /opt/packages/
RUN /opt/ablate/bin/pip install --quiet --no-deps /opt/packages/*.whl
ENV PATH=/opt/ablate/bin:$PATH PYTHONUNBUFFERED=1 ABLATE_HOME=/var/lib/ablate ABLATE_HOST=0.0.0.0 MPLCONFIGDIR=/tmp
USER 10001
WORKDIR /var/lib/ablate
EXPOSE 8321
CMD ["python", "-m", "service.app"]
