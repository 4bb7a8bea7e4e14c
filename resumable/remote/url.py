"""Addresses of remote folders: their form, their secrets, the packages that they need, their local cache."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ..errors import UsageError, did_you_mean
from ..files import disk


def is_url(path: object) -> bool:
    """Return whether this is an address rather than a local path.

    >>> is_url("s3://bucket/exp"), is_url("runs/exp"), is_url(Path("runs"))
    (True, False, False)
    """
    return isinstance(path, str) and _URL.match(path) is not None


def shown(url: str) -> str:
    """Return an address without its secrets.

    >>> shown("sftp://ann:secret@host:2222/exp/"), shown("https://host/exp?token=secret")
    ('sftp://ann@host:2222/exp', 'https://host/exp')
    """
    login, rest = _parts(url)
    at = f"{login.partition(':')[0]}@" if login else ""
    return f"{url.partition('://')[0]}://{at}{_SECRET_PART.split(rest)[0].rstrip('/')}"


def _parts(url: str) -> tuple[str, str]:
    """Return `user:password`, and the rest from the host on."""
    rest = url.partition("://")[2]
    place, slash, path = rest.partition("/")
    if "@" in path and "@" not in place and ":" in place and not _PORT.search(place):
        # A password with a slash in it: the part after the slash would be shown as a path.
        login, _, rest = rest.partition("@")
        return login, rest
    login, _, host = place.rpartition("@")
    return login, f"{host}{slash}{path}"


def check(url: str) -> None:
    """Raise UsageError for an address that is none, or that needs a package that is not installed."""
    if not is_url(url) or not _names_a_folder(url):
        likely = _likely(str(url))
        raise UsageError(
            f"{url!r} is not the address of a remote folder.{likely}",
            fix="give one such as remote='s3://bucket/exp', 'sftp://host/folder' or 'file:///mnt/backup/exp'.",
            command="give one such as s3://bucket/exp, sftp://host/folder or file:///mnt/backup/exp.",
        )
    from fsspec.registry import known_implementations, registry

    scheme = url.partition("://")[0]
    if scheme in registry:
        return
    if scheme not in known_implementations:
        raise UsageError(
            f"{scheme}:// is no filesystem that fsspec knows." + did_you_mean(scheme, _USUAL, "{}://".format),
            fix="use one that docs/recipes/remotes.md names, or another that fsspec lists.",
        )
    kind = known_implementations[scheme]["class"]
    needed = _NEEDS.get(kind) or kind.partition(".")[0]
    if importlib.util.find_spec(needed) is None:
        extra = _EXTRAS.get(scheme)
        raise UsageError(
            f"{scheme}:// needs the package {_BETTER.get(needed, needed)}.",
            fix=f"pip install 'torch-resumable[{extra}]'" if extra else f"pip install {needed}",
        )


def _likely(url: str) -> str:
    """Return the end of the message for a text that is nearly an address; "" if it is not like one."""
    split = _NEARLY.fullmatch(url)
    if split and split[1] not in ("file", "local"):
        return did_you_mean(split[1], _USUAL, lambda meant: f"'{meant}://{split[3]}'") if split[3] else ""
    path = f"{'' if split[2] == '//' else split[2]}{split[3]}" if split else url
    return f" Did you mean 'file://{os.path.abspath(os.path.expanduser(path))}'?" if path else ""


def refuse_nearly(path: object) -> None:
    """Raise UsageError for a local path that is most likely an address with a slash too few."""
    found = _NEARLY.fullmatch(path) if isinstance(path, str) else None
    if found and found[1] in _USUAL and found[2] == "/" and not os.path.lexists(found[0]):
        raise UsageError(
            f"the run directory {path!r} looks like an address that lacks a slash.{_likely(found[0])}",
            fix=f"write the address with two slashes; './{path}' is a folder of that name.",
        )


def _names_a_folder(url: str) -> bool:
    # file://exp would depend on the directory in which the script is started.
    place = shown(url).partition("://")[2]
    return _ABSOLUTE.match(place) is not None if url.startswith(("file://", "local://")) else bool(place)


def secrets_in(url: str, options: Mapping[str, Any]) -> list[str]:
    """Return the secrets of an address, its options and the environment, longest first."""
    found = [*_texts(options)]
    if password := _parts(url)[0].partition(":")[2]:
        found += [password, unquote(password)]
    found += _SECRET_PART.split(url.partition("://")[2], maxsplit=1)[1:]
    found += [value for name, value in os.environ.items() if _is_secret(name)]
    # A short one may be part of any word.
    return sorted({text for text in found if len(text) >= _SHORTEST_SECRET}, key=len, reverse=True)


def _texts(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _texts(value)
        elif isinstance(value, str) and _is_secret(str(name)):
            yield value


def _is_secret(name: str) -> bool:
    # Also names such as secretAccessKey and X-Api-Key.
    return _SECRET_NAME.search(_WORD_BEGINS.sub("_", name).replace("-", "_")) is not None


def cache_folder(url: str) -> Path:
    """Return the local folder of a run that was given as an address.

    >>> cache_folder("s3://bucket/exp").name
    's3-bucket-exp-66064cff'
    """
    # Imported here, because few commands name a remote.
    import hashlib

    plain = shown(url)
    words = re.sub(r"[^a-zA-Z0-9._]+", "-", plain).strip("-.")[-_LONGEST_NAME:]
    # Other addresses may have the same words.
    digest = hashlib.sha256(plain.encode()).hexdigest()[:8]
    return disk.cache() / f"{words}-{digest}"


_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")
_NEARLY = re.compile(r"([a-zA-Z][a-zA-Z0-9]+):(/*)(.*)")
_USUAL = ("s3", "gs", "gcs", "az", "abfs", "sftp", "ssh", "hf", "file", "memory")
_ABSOLUTE = re.compile(r"/|[a-zA-Z]:")
_PORT = re.compile(r":[0-9]*(?:[?#]|$)")
_SECRET_PART = re.compile(r"[?#]")
_WORD_BEGINS = re.compile(r"(?<=[a-z])(?=[A-Z])")
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:key|secret|password|passwd|passphrase|token|sas|credential|signature|authorization)(?:_|$|s$)"
    r"|connection_string",
    re.IGNORECASE,
)
_SHORTEST_SECRET = 6
_LONGEST_NAME = 80
_EXTRAS = {
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "gcs"),
    **dict.fromkeys(("abfs", "abfss", "az", "adl"), "azure"),
    **dict.fromkeys(("sftp", "ssh"), "sftp"),
    "hf": "hf",
}
_NEEDS = {"fsspec.implementations.sftp.SFTPFileSystem": "paramiko"}
_BETTER = {"paramiko": "sshfs"}
