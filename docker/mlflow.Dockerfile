# The MLflow server, in the version that the service uses: runs in PostgreSQL, artefacts in a volume behind the server.
FROM python:3.11-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python3 -m venv /opt/mlflow
COPY constraints.txt ./
RUN /opt/mlflow/bin/python -m pip install --quiet --constraint constraints.txt mlflow 'psycopg[binary]' 'starlette<2' \
    && /opt/mlflow/bin/python -m compileall -q /opt/mlflow/lib

FROM python:3.11-slim-bookworm
RUN useradd --uid 10001 --create-home --home-dir /var/lib/mlflow mlflow
COPY --from=build /opt/mlflow /opt/mlflow
COPY docker/mlflow/start.sh /opt/mlflow/bin/start-mlflow
ENV PATH=/opt/mlflow/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp \
    MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false MLFLOW_DISABLE_TELEMETRY=true DO_NOT_TRACK=true
USER 10001
WORKDIR /tmp
EXPOSE 8322
CMD ["start-mlflow"]
