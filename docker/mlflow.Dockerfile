# The MLflow server, in the version that the service uses: runs and accounts in PostgreSQL, artefacts in a volume behind
# the server.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1
WORKDIR /src
COPY pyproject.toml ./
COPY requirements/install.py requirements/*.lock requirements/
RUN python3 requirements/install.py --only /opt/mlflow mlflow-server

FROM ${PYTHON_IMAGE}
RUN useradd --uid 10001 --create-home --home-dir /var/lib/mlflow mlflow
COPY --from=build /opt/mlflow /opt/mlflow
COPY docker/mlflow/server.py /opt/mlflow/server.py
RUN printf '#!/bin/sh\nexec /opt/mlflow/bin/python /opt/mlflow/server.py "$@"\n' > /opt/mlflow/bin/mlflow-accounts \
    && chmod 755 /opt/mlflow/bin/mlflow-accounts
ENV PATH=/opt/mlflow/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp \
    MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false MLFLOW_DISABLE_TELEMETRY=true DO_NOT_TRACK=true \
    MLFLOW_HOST=0.0.0.0 MLFLOW_PORT=8322 MLFLOW_ARTIFACTS_DESTINATION=/var/lib/mlflow/artifacts
USER 10001
WORKDIR /tmp
EXPOSE 8322
CMD ["mlflow-accounts", "start"]
