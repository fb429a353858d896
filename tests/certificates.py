"""A certificate authority of a test and a server's certificate by it, for localhost."""

import secrets
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_NAMES = [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]


def write(folder: Path, *, names: list[x509.GeneralName] | None = None, ends: timedelta = timedelta(days=1)) -> None:
    """Write ca.pem, server.pem and server.key into `folder`; the server's certificate `ends` from now on."""
    authority, leaf = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = _name(f"authority {secrets.token_hex(8)}")
    ca = _builder(issuer, issuer, authority.public_key(), ends=timedelta(days=1))
    ca = ca.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    server = _builder(_name("server of a test"), issuer, leaf.public_key(), ends=ends)
    server = server.add_extension(x509.SubjectAlternativeName(names or _NAMES), critical=False)
    for name, made in (("ca.pem", ca), ("server.pem", server)):
        pem = made.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        (folder / name).write_bytes(pem)
    key = folder / "server.key"
    key.touch(mode=0o600)
    key.write_bytes(
        leaf.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, *, ends: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + ends)
