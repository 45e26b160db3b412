# syntax=docker/dockerfile:1
FROM python:3.13-slim AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python -m venv --without-pip /opt/gateway
WORKDIR /src
# First what changes rarely: every package at the version and hash that was tested.
COPY requirements.lock ./
RUN pip --python /opt/gateway/bin/python install --compile --require-hashes -r requirements.lock
COPY pyproject.toml README.md LICENSE gateway.yaml ./
COPY config ./config
COPY gateway ./gateway
RUN pip --python /opt/gateway/bin/python install --compile --no-deps .

FROM python:3.13-slim
# Bytecode of the standard library: the base image brings none, and the gateway's user can write none.
RUN python -m compileall -q -x 'site-packages|idlelib|tkinter|turtledemo|ensurepip|pydoc_data' \
    "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
RUN groupadd --gid 10001 gateway \
    && useradd --uid 10001 --gid gateway --home-dir /data --no-create-home --shell /usr/sbin/nologin gateway \
    && install -d -o gateway -g gateway -m 0700 /data \
    && install -d /etc/gateway
COPY --from=build /opt/gateway /opt/gateway
# HOME: with a Redis the journal is kept below it.
ENV PATH=/opt/gateway/bin:$PATH \
    HOME=/data \
    PYTHONDONTWRITEBYTECODE=1 \
    GATEWAY_STORE_URL=sqlite:///data/gateway.db
# By number, so that Kubernetes can tell that it is not root.
USER 10001:10001
VOLUME /data
# A gateway.yaml mounted here is found; without one the defaults hold.
WORKDIR /etc/gateway
EXPOSE 8484
# Not urllib: it would ask the proxy that HTTP_PROXY names for the providers.
HEALTHCHECK --interval=30s --timeout=5s --start-period=10s \
    CMD ["python", "-c", "import http.client, os, sys; c = http.client.HTTPConnection('127.0.0.1', int(os.environ.get('GATEWAY_SERVER_PORT', '8484')), timeout=3); c.request('GET', '/healthz'); sys.exit(c.getresponse().status != 200)"]
ENTRYPOINT ["gateway"]
CMD ["serve", "--host", "0.0.0.0"]
