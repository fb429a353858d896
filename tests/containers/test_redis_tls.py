"""`make test-containers`, last part: the service and the worker over a Redis that speaks TLS only."""

import json

import pytest
from cryptography import x509

from tests import certificates
from tests.containers import compose_stack as stack
from tests.containers.asking import SPEC, ablate, done, eventually, get, get_if_up

pytestmark = [pytest.mark.timeout(3000), pytest.mark.skipif(stack.why_not() is not None, reason=str(stack.why_not()))]

OVERRIDE = stack.ROOT / "tests" / "containers" / "redis-tls.yaml"
TRUST = "ssl_cert_reqs=required&ssl_ca_certs=/run/secrets/redis_authority"
REPLACED = ("redis", "api", "background", "worker-cpu")


def test_wake_ups_travel_over_tls(environment, tmp_path):
    certificates.write(tmp_path, names=[x509.DNSName("redis")])
    password = (stack.ROOT / "secrets" / "redis_password").read_text()
    (tmp_path / "ablate_broker_url").write_text(f"rediss://:{password}@redis:6379/0?{TRUST}")
    for file in tmp_path.iterdir():
        file.chmod(0o644)  # other users read them inside containers
    stack.compose(
        *("-f", str(OVERRIDE), "up", "-d", "--no-build", "--no-deps", "--force-recreate", *REPLACED),
        REDIS_TLS=str(tmp_path),
    )
    for service in ("redis", "api", "worker-cpu"):
        for name in stack.containers(service):
            stack.wait_healthy(name)
    eventually(lambda: get_if_up(environment, "/readyz").get("degraded") == [], "readiness")
    assert get(environment, "/readyz")["checks"]["broker"]["detail"].startswith("rediss://")
    plain = stack.engine("exec", stack.container("redis"), "redis-cli", "ping", check=False)
    assert "PONG" not in plain
    worker = stack.container("worker-cpu")
    eventually(lambda: "Connected to rediss://" in stack.engine("logs", worker), "the worker's connection")
    path = f"/v1/ablations/{json.loads(ablate(environment, 'submit', str(SPEC), '--json'))['id']}"
    eventually(lambda: done(get_if_up(environment, path)) >= 1, "a block", 300)
