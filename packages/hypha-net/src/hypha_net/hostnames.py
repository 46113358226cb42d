"""Which host names may stand in a multiaddr: those that its own codec and the system's resolver both take.

Each of the two has errors of its own, so names are checked where addresses come in: `node.config_address` for what an
operator writes, `addresses` for what peers report.
"""

from __future__ import annotations


def check_host_name(name: str) -> None:
    """Check a name that is to be looked up, and look nothing up.

    Raises:
        ValueError: nobody can have that name; the message says why.
    """
    import idna  # here: most addresses hold numbers, and a command line should not wait for it

    try:
        idna.encode(name, uts46=True)
        name.encode("idna")  # what the resolver does first, by rules that are older and stricter in places
    except UnicodeError as error:
        raise ValueError(f"{name[:80]!r} is no host name ({error}): letters, digits and inner hyphens are") from None
