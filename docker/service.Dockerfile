# The service: API (the default command), background process (`python -m ablate.service.background.main`) and migration
# (`python -m ablate.service.store.migrate`). Settings come from the environment or from files below /run/secrets.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
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

FROM ${PYTHON_IMAGE}
RUN useradd --uid 10001 --create-home --home-dir /var/lib/ablate ablate
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Packages are a layer of their own, which a new version of the code does not change.
COPY pyproject.toml /opt/packages/
COPY requirements/install.py requirements/*.lock /opt/packages/requirements/
RUN python3 /opt/packages/requirements/install.py --packages /opt/ablate service
COPY --from=code /wheels /opt/packages/
RUN /opt/ablate/bin/pip install --quiet --no-index --no-deps /opt/packages/*.whl
ENV PATH=/opt/ablate/bin:$PATH PYTHONUNBUFFERED=1 ABLATE_HOME=/tmp ABLATE_HOST=0.0.0.0 ABLATE_GATEWAY=true MPLCONFIGDIR=/tmp
USER 10001
WORKDIR /var/lib/ablate
EXPOSE 8321
CMD ["python", "-m", "ablate.service.app"]
