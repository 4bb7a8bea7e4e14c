"""Explains the errors of filesystems: whether a retry may help, what to do, and their text."""

from __future__ import annotations

import re
from collections.abc import Sequence


def is_final(error: BaseException) -> bool:
    """Return whether a retry is useless until the user changes something."""
    if isinstance(error, (PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError)):
        return True
    if isinstance(error, (TypeError, ImportError, FileNotFoundError)):
        return True
    # gcsfs has no class of its own for it.
    if str(error).startswith("Forbidden"):
        return True
    return any(kind.__name__ in _FINAL for kind in type(error).mro())


_FINAL = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "ParamValidationError",
    "InvalidRegionError",
    "ProfileNotFound",
    "UnauthorizedSSOTokenError",
    "AuthenticationException",
    "BadHostKeyException",
    "PermissionDenied",
    "HostKeyNotVerifiable",
    "ClientAuthenticationError",
    "DefaultCredentialsError",
    "RepositoryNotFoundError",
)


def advice(error: BaseException) -> str:
    """Return what to do about an error."""
    if is_final(error):
        return (
            "look at the address, at the credentials that this machine has for it, and at what they may do; "
            "docs/recipes/remotes.md says where they are looked for."
        )
    return "look whether it can be reached and has room; what is saved is on the local disk."


def text(error: BaseException, secrets: Sequence[str]) -> str:
    """Return the text of an error without the secrets, which are given longest first."""
    found = f"{error.strerror}" if isinstance(error, OSError) and error.strerror else str(error)
    found = " ".join(found.split()).rstrip(".") or type(error).__name__
    for secret in secrets:
        found = found.replace(secret, "***")
    return _QUERY.sub("?***", found)[:_LONGEST_TEXT]


_LONGEST_TEXT = 500
_QUERY = re.compile(r"\?[^\s'\"]*=[^\s'\"]*")
