# kvalign in one image: the API, the worker, and all else that the command `kvalign` does. docs/operations.md deploys it.
#
#   docker build --tag kvalign .
#   docker build --tag kvalign:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .

ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
# Where torch comes from decides what it computes on; its version is that of constraints.txt in every case.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /build
COPY constraints.txt ./
# Wheels alone, so that no package of others compiles or runs anything here; torch from its one index, the rest from PyPI.
RUN python -m venv /opt/kvalign \
    && /opt/kvalign/bin/pip install --only-binary :all: --constraint constraints.txt setuptools \
    && /opt/kvalign/bin/pip install --only-binary :all: --constraint constraints.txt \
        --no-deps --index-url "${TORCH_INDEX}" torch
COPY pyproject.toml README.md LICENSE ./
COPY kvalign kvalign
COPY worker worker
COPY service service
COPY devhub devhub
RUN /opt/kvalign/bin/pip install --only-binary :all: --constraint constraints.txt --no-build-isolation ".[service,otel]" \
    && /opt/kvalign/bin/pip check

FROM ${PYTHON_IMAGE}
RUN groupadd --gid 10001 kvalign \
    && useradd --uid 10001 --gid kvalign --no-create-home --home-dir /tmp --shell /usr/sbin/nologin kvalign \
    && install --directory --owner kvalign --group kvalign --mode 0700 /data
COPY --from=build /opt/kvalign /opt/kvalign
# The root may be read-only: jobs and what Numba compiles for them go to /data, all else that is written to /tmp.
ENV PATH=/opt/kvalign/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    HF_HOME=/tmp/huggingface \
    MPLCONFIGDIR=/tmp/matplotlib \
    NUMBA_CACHE_DIR=/tmp/numba \
    KVALIGN_DATA_DIR=/data \
    KVALIGN_HOST=0.0.0.0
USER 10001:10001
WORKDIR /tmp
EXPOSE 8400
# Of the API; a worker is asked with `python -m worker.alive`.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 CMD ["python", "-m", "service.alive"]
ENTRYPOINT ["kvalign"]
CMD ["api"]
