"""Start the MLflow server of the compose file, and manage the accounts of people who may read it.

    mlflow-accounts start           serve; the service's own account gets the password of its secret
    mlflow-accounts add NAME        create an account that may read, print its password once
    mlflow-accounts remove NAME     end it
    mlflow-accounts list            print the names

Accounts are in MLflow's database. The secrets are in files, so that no list of processes shows them. MLflow reads its
other settings from the environment (MLFLOW_HOST, MLFLOW_WORKERS and others).
"""

import hashlib
import os
import secrets
import sys
from pathlib import Path

SERVICE = "ablate"
"""The account that writes: that of the service."""
CACHED_S = 10
"""How long a password that was right is not looked up again. So a removed account reads on for as long."""
NEEDED = {
    "MLFLOW_WORKERS": "how many processes answer",
    "MLFLOW_SERVER_ALLOWED_HOSTS": "names that people and the service use",
}
"""What the environment must have, since MLflow's own defaults fit one machine."""
SETTINGS = """[mlflow]
default_permission = READ
database_uri = {database}
auth_cache_ttl_seconds = {cached}
"""


def secret(name: str) -> str:
    """Return a secret. Raises SystemExit if its file is missing or empty."""
    file = Path(os.environ.get("MLFLOW_SECRETS", "/run/secrets")) / name
    value = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
    if not value:
        raise SystemExit(f"{file} is missing or empty; docker/make-secrets.sh writes it")
    return value


def configure() -> None:
    """Write the settings of MLflow's accounts where this process alone can read them, and point MLflow to them."""
    file = Path(os.environ.get("TMPDIR", "/tmp")) / f"mlflow-accounts-{os.getpid()}.ini"  # noqa: S108
    file.touch(mode=0o600)
    database = secret("mlflow_database_url").replace("%", "%%")
    file.write_text(SETTINGS.format(database=database, cached=CACHED_S), encoding="utf-8")
    password = secret("mlflow_password")
    key = hashlib.sha256(f"forms of {password}".encode()).hexdigest()
    os.environ |= {
        "MLFLOW_AUTH_CONFIG_PATH": str(file),
        "MLFLOW_AUTH_ADMIN_USERNAME": SERVICE,
        "MLFLOW_AUTH_ADMIN_PASSWORD": password,
        "MLFLOW_FLASK_SERVER_SECRET_KEY": key,
        "MLFLOW_BACKEND_STORE_URI": secret("mlflow_database_url"),
    }


def accounts():
    """Open MLflow's accounts; tables that are missing are made."""
    from mlflow.server.auth.sqlalchemy_store import SqlAlchemyStore

    store = SqlAlchemyStore()
    store.init_db(secret("mlflow_database_url"))
    return store


def start() -> None:
    """Give the service's account its password, then become the server."""
    for variable, meaning in NEEDED.items():
        if not os.environ.get(variable):
            raise SystemExit(f"{variable} is not set: {meaning}")
    store, password = accounts(), secret("mlflow_password")
    if not store.has_user(SERVICE):
        store.create_user(SERVICE, password, is_admin=True)
    elif not store.authenticate_user(SERVICE, password):
        store.update_user(SERVICE, password=password, is_admin=True)
    # On a busy machine its processes may load for minutes; by default their parent kills them after 5 s of silence.
    patience = ("--uvicorn-opts", "--timeout-worker-healthcheck 300")
    os.execv(sys.executable, [sys.executable, "-m", "mlflow", "server", "--app-name", "basic-auth", *patience])  # noqa: S606


def add(name: str) -> None:
    """Create an account that may read; print its password."""
    store = accounts()
    if store.has_user(name):
        raise SystemExit(f"the account {name!r} exists; remove it first")
    password = secrets.token_urlsafe(24)
    store.create_user(name, password)
    print(password)  # noqa: T201


def remove(name: str) -> None:
    """End an account."""
    store = accounts()
    people = [user.username for user in store.list_users() if user.username != SERVICE]
    if name not in people:
        raise SystemExit(f"no account {name!r}; accounts of people: {', '.join(sorted(people)) or 'none'}")
    store.delete_user(name)


def show() -> None:
    """Print the names of all accounts."""
    for user in sorted(accounts().list_users(), key=lambda user: user.username):
        print(user.username, "writes" if user.is_admin else "reads")  # noqa: T201


def main(words: list[str]) -> None:
    """Run one command."""
    commands = {("start", 0): start, ("add", 1): add, ("remove", 1): remove, ("list", 0): show}
    command = commands.get((words[0], len(words) - 1)) if words else None
    if command is None:
        raise SystemExit(__doc__)
    configure()
    command(*words[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
