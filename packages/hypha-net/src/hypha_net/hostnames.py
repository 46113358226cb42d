"""Validates host names in multiaddrs: valid for the multiaddr codec and for the system's resolver.

Both would raise errors of their own, later. Called for addresses that an operator writes (`node.config.address_types`)
and for those that peers report (`addresses`).
"""

from __future__ import annotations


def validate_host_name(name: str) -> None:
    """Check the syntax of a host name, without a look-up.

    Raises:
        ValueError: the name is not valid; the message says why.
    """
    import idna  # imported late: most addresses are numeric, and the import would slow down every command

    try:
        idna.encode(name, uts46=True)
        name.encode("idna")  # the resolver's encoding: IDNA 2003, which is stricter in places
    except UnicodeError as error:
        raise ValueError(f"{name[:80]!r} is not a host name ({error}): use letters, digits and inner hyphens") from None
