"""A certificate authority, a certificate of this machine alone, and keys of nodes: what a SuperLink asks for."""

import datetime
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

PEM = serialization.Encoding.PEM


def write_authority(folder: Path, name: str = "ca") -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """`ca.pem`, which nodes and the command line trust, and what signs certificates; its key is not kept."""
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"sparing federation {name}")])
    certificate = (
        _certificate(subject, subject, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(_usage(key_cert_sign=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / f"{name}.pem").write_bytes(certificate.public_bytes(PEM))
    return certificate, key


def write_server_certificate(folder: Path, authority: tuple[x509.Certificate, ec.EllipticCurvePrivateKey]) -> None:
    """`server.pem` and `server.key` of the SuperLink at 127.0.0.1."""
    issuer, signing = authority
    key = ec.generate_private_key(ec.SECP384R1())
    names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
    certificate = (
        _certificate(
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")]), issuer.subject, key.public_key()
        )
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), critical=False)
        .add_extension(_usage(digital_signature=True), critical=True)
        .sign(signing, hashes.SHA256())
    )
    (folder / "server.pem").write_bytes(certificate.public_bytes(PEM))
    form = serialization.PrivateFormat.PKCS8
    _write_secret(folder / "server.key", key.private_bytes(PEM, form, serialization.NoEncryption()))


def write_node_key(folder: Path, name: str) -> Path:
    """`NAME`, a node's private key, and `NAME.pub`, which is registered with the SuperLink."""
    key = ec.generate_private_key(ec.SECP384R1())
    form = serialization.PrivateFormat.OpenSSH
    _write_secret(folder / name, key.private_bytes(PEM, form, serialization.NoEncryption()))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    (folder / f"{name}.pub").write_bytes(public)
    return folder / name


def _write_secret(path: Path, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=7))
    )


def _usage(digital_signature: bool = False, key_cert_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=key_cert_sign,
        encipher_only=False,
        decipher_only=False,
    )
