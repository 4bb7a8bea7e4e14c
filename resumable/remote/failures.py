"""What the error of a filesystem means: whether trying again may help, and what is told of it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .deadline import TooLong


def is_final(error: BaseException) -> bool:
    """Whether trying again soon makes no sense: somebody has to do something first."""
    if isinstance(error, (PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError)):
        return True
    if isinstance(error, (TypeError, ImportError, FileNotFoundError, TooLong)):
        return True
    # (gcsfs has no kind of its own for it)
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
    """Return what to do about it."""
    if is_final(error):
        return (
            "look at the address, at the credentials that this machine has for it, and at what they may do; "
            "docs/recipes/remotes.md says where they are looked for."
        )
    return "look whether it can be reached and has room; what is saved is on the local disk."


def text(error: BaseException, secrets: Sequence[str]) -> str:
    """Return what an error says, without the secrets (longest first)."""
    told = f"{error.strerror}" if isinstance(error, OSError) and error.strerror else str(error)
    told = " ".join(told.split()).rstrip(".") or type(error).__name__
    for secret in secrets:
        told = told.replace(secret, "***")
    return _QUERY.sub("?***", told)[:_LONGEST_TEXT]


_LONGEST_TEXT = 500
_QUERY = re.compile(r"\?[^\s'\"]*=[^\s'\"]*")
