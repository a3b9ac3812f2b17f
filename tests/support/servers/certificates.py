"""Certificates for servers on loopback, signed by a CA of their own."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


@dataclass(frozen=True)
class Certificates:
    """PEM files: the CA's certificate, the server's with the names 127.0.0.1 and localhost, and its key."""

    ca: Path
    cert: Path
    key: Path


def make_certificates(folder: Path) -> Certificates:
    """Write them into this folder."""
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a CA of the tests")])
    names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
    ca = _builder(issuer, issuer, ca_key.public_key()).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    server = _builder(x509.Name([]), issuer, key.public_key()).add_extension(
        x509.SubjectAlternativeName(names), critical=True
    )
    pem = serialization.Encoding.PEM
    made = Certificates(folder / "ca.crt", folder / "tls.crt", folder / "tls.key")
    made.ca.write_bytes(ca.sign(ca_key, hashes.SHA256()).public_bytes(pem))
    made.cert.write_bytes(server.sign(ca_key, hashes.SHA256()).public_bytes(pem))
    plain = serialization.NoEncryption()
    made.key.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return made


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=24))
    )
