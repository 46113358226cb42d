"""Command line `hypha-certutil`: each command generates keys, calls `authority`, then `storage`."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from hypha_certutil import authority, storage
from hypha_certutil.authority import ROLES, Authority
from hypha_certutil.errors import CertutilError
from hypha_certutil.storage import PRIVATE, Output

_FOLDER = click.Path(file_okay=False, path_type=Path)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

_dir = click.option("--dir", "folder", type=_FOLDER, default=".", help="Folder of the authority.  [default: here]")
_out = click.option("--out", type=_FOLDER, default=None, help="Folder to write to.  [default: --dir]")
_force = click.option("--force", is_flag=True, help="Replace files that exist.")
_role = click.option("--role", type=click.Choice(ROLES), default=None, help="Role that the certificate names.")
_org = click.option("--org", default="org", show_default=True, help="Name of the organisation's CA.")
_format = click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", help="How to print.")


def _days(default: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option("--days", type=click.IntRange(min=1), default=default, show_default=True, help="Validity.")


class _Group(click.Group):
    """Command group that reports a `CertutilError` in one line and exits with code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CertutilError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hypha-certutil")
@click.option("--no-color", is_flag=True, expose_value=False, help="Print without colours, ever.")
def main() -> None:
    """Offline certificate authority of a Hypha network.

    Make a root, an organisation under it, and a certificate for each node; withdraw one with revoke.
    """


@main.command()
@click.argument("name", default="root")
@_dir
@_days(3650)
@_force
@_format
def root(name: str, folder: Path, days: int, force: bool, form: str) -> None:
    """Make a root CA, by default called "root", and its empty revocation list."""
    key = Ed25519PrivateKey.generate()
    made = authority.make_root(name, key, days=days, now=_now())
    _write_authority(storage.names_in(folder, name), made, force, form)


@main.command()
@click.argument("name", default="org")
@click.option("--root", "root_name", default="root", show_default=True, help="Name of the root CA.")
@_dir
@_days(1825)
@_force
@_format
def org(name: str, root_name: str, folder: Path, days: int, force: bool, form: str) -> None:
    """Make an organisation's CA under the root, by default called "org", and its empty revocation list."""
    above = storage.read_authority(folder, root_name)
    key = Ed25519PrivateKey.generate()
    made = authority.make_org(name, key, above, days=days, now=_now())
    _write_authority(storage.names_in(folder, name), made, force, form)


@main.command()
@click.argument("name")
@_role
@_org
@_dir
@_out
@_days(365)
@_force
@_format
def node(
    name: str, role: str | None, org: str, folder: Path, out: Path | None, days: int, force: bool, form: str
) -> None:
    """Make key, certificate and trust bundle of node NAME, and print its peer id.

    Where the key must not leave the node's machine, use request there and sign here.
    """
    issuer = storage.read_authority(folder, org)
    key = Ed25519PrivateKey.generate()
    made = authority.make_node(name, key.public_key(), issuer, role=role, days=days, now=_now())
    names = storage.names_in(out or folder, name)
    secret = Output(names.key, storage.key_pem(key), PRIVATE)
    _write_node(names, issuer, made, [secret], force=force, form=form)


@main.command()
@click.argument("name")
@_role
@click.option("--out", type=_FOLDER, default=".", help="Folder to write to.  [default: here]")
@_force
@_format
def request(name: str, role: str | None, out: Path, force: bool, form: str) -> None:
    """Make the key of node NAME and a request for its certificate, on the node's own machine."""
    key = Ed25519PrivateKey.generate()
    made = authority.make_request(name, key, role)
    names = storage.names_in(out, name)
    outputs = [Output(names.key, storage.key_pem(key), PRIVATE), Output(names.request, made.public_bytes(Encoding.PEM))]
    storage.write_all(outputs, force=force)
    peer = authority.peer_id(key.public_key())
    _show({"name": name, "peer_id": peer, "role": role, "key": names.key, "request": names.request}, form)


@main.command()
@click.argument("request", type=_FILE)
@_role
@_org
@_dir
@_out
@_days(365)
@_force
@_format
def sign(
    request: Path, role: str | None, org: str, folder: Path, out: Path | None, days: int, force: bool, form: str
) -> None:
    """Sign a node's REQUEST: write its certificate and trust bundle, and print its peer id.

    A role is granted only when --role names it.
    """
    issuer = storage.read_authority(folder, org)
    wanted = authority.read_request(storage.read_request(request))
    if wanted.role is not None and wanted.role != role:
        raise CertutilError(f"{request}: asks for the role {wanted.role}; grant it with --role {wanted.role}")
    made = authority.make_node(wanted.name, wanted.key, issuer, role=role, days=days, now=_now())
    _write_node(storage.names_in(out or folder, wanted.name), issuer, made, [], force=force, form=form)


@main.command()
@click.argument("certificate", type=_FILE)
@_org
@_dir
@_days(365)
@_format
def renew(certificate: Path, org: str, folder: Path, days: int, form: str) -> None:
    """Replace a node's CERTIFICATE by one that ends later: same key, peer id, name and role.

    A running node takes it without a restart. The old one is kept beside it, since it is good until its end: give both
    to revoke to withdraw the node. One that has been revoked is not renewed.
    """
    issuer = storage.read_authority(folder, org)
    old = storage.read_certificates(certificate)[0]
    revoked = storage.read_crl(storage.names_in(folder, org).crl)
    made = authority.renew_node(old, revoked, issuer, days=days, now=_now())
    kept = certificate.with_name(f"{certificate.stem}-{f'{old.serial_number:x}'[:8]}.pem")
    storage.write_all([Output(kept, storage.bundle_pem([old]))], force=True)
    storage.replace(Output(certificate, storage.bundle_pem([made, *issuer.intermediates])))
    peer = authority.peer_id(authority.ed25519_key(made, "certificate"))
    shown = {"name": authority.common_name(made), "peer_id": peer, "role": authority.role_of(made)}
    _show({**shown, "certificate": certificate, "old": kept, "not_after": made.not_valid_after_utc}, form)


@main.command()
@click.argument("certificates", nargs=-1, type=_FILE)
@click.option("--ca", default="org", show_default=True, help="Name of the CA that issued them.")
@_dir
@_days(365)
@_format
def revoke(certificates: tuple[Path, ...], ca: str, folder: Path, days: int, form: str) -> None:
    """Withdraw CERTIFICATES: put them on the CA's revocation list and update crls.pem.

    Without certificates the list is renewed: one that has expired stops a network that checks lists.
    """
    issuer = storage.read_authority(folder, ca)
    names = storage.names_in(folder, ca)
    withdrawn = [storage.read_certificates(path)[0] for path in certificates]
    crl = authority.revoke(issuer, storage.read_crl(names.crl), withdrawn, days=days, now=_now())
    collected = storage.write_crl(names, crl)
    result = {"ca": ca, "revoked": [authority.common_name(one) for one in withdrawn], "on_list": len(list(crl))}
    _show({**result, "crl": names.crl, "crls": collected, "next_update": crl.next_update_utc}, form)


def _write_authority(names: storage.Names, made: Authority, force: bool, form: str) -> None:
    certificate = Output(names.certificate, storage.bundle_pem([made.certificate]))
    outputs = [Output(names.key, storage.key_pem(made.key), PRIVATE), certificate]
    if made.above:
        outputs.append(Output(names.trust, storage.bundle_pem(made.trust)))
    storage.write_all(outputs, force=force)
    crl = authority.make_crl(made, [], number=1, days=365, now=_now())
    collected = storage.write_crl(names, crl)
    shown = {
        "name": names.name,
        "certificate": names.certificate,
        "key": names.key,
        "crl": names.crl,
        "crls": collected,
        "not_after": made.certificate.not_valid_after_utc,
    }
    _show(shown, form)


def _write_node(
    names: storage.Names, issuer: Authority, made: x509.Certificate, outputs: list[Output], *, force: bool, form: str
) -> None:
    chain = Output(names.certificate, storage.bundle_pem([made, *issuer.intermediates]))
    storage.write_all([*outputs, chain, Output(names.trust, storage.bundle_pem(issuer.trust))], force=force)
    shown: dict[str, object] = {
        "name": names.name,
        "peer_id": authority.peer_id(authority.ed25519_key(made, "certificate")),
        "role": authority.role_of(made),
        "certificate": names.certificate,
        "trust": names.trust,
        "not_after": made.not_valid_after_utc,
    }
    _show({**shown, **({"key": names.key} if outputs else {})}, form)


def _show(result: dict[str, object], form: str) -> None:
    """Print the result as a JSON object, or one line per entry."""
    plain = {key: _plain(value) for key, value in result.items()}
    if form == "json":
        click.echo(json.dumps(plain))
        return
    for key, value in plain.items():
        if value is not None:
            text = ", ".join(map(str, value)) if isinstance(value, list) else value
            click.echo(f"{key.replace('_', ' '):<12} {text}")


def _plain(value: object) -> object:
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%dT%H:%M:%SZ")
    return str(value) if isinstance(value, Path) else value


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)
