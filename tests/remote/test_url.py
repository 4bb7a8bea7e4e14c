"""Addresses of remote folders: what is shown of them is no secret, and what they need is named."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from resumable import UsageError
from resumable.remote import url

# The package has another thing of that name
REGISTRY = importlib.import_module("fsspec.registry")


@pytest.mark.parametrize(
    ("place", "is_one"),
    [
        ("s3://bucket/exp", True),
        ("file:///mnt/exp", True),
        ("git+ssh://host/exp", True),
        ("runs/exp", False),
        ("C://exp", False),
        ("runs/s3://exp", False),
        (Path("s3://bucket"), False),
        (None, False),
    ],
)
def test_an_address_is_distinguished_from_a_path(place: object, is_one: bool) -> None:
    assert url.is_url(place) is is_one


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        ("s3://bucket/exp/", "s3://bucket/exp"),
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/ann@home:1/exp", "s3://bucket/ann@home:1/exp"),
        ("sftp://ann@host:22/exp", "sftp://ann@host:22/exp"),
        ("sftp://host:22/ann@home", "sftp://host:22/ann@home"),
        ("sftp://ann:hidden@host:22/exp", "sftp://ann@host:22/exp"),
        ("sftp://ann:hid@den@host/exp", "sftp://ann@host/exp"),
        ("sftp://ann:hid/den@host/exp", "sftp://ann@host/exp"),
        ("sftp://ann:hid?den@host/exp", "sftp://ann@host/exp"),
        ("https://host/exp?token=hidden", "https://host/exp"),
        ("https://host?token=hidden", "https://host"),
        ("https://host/exp#hidden", "https://host/exp"),
        ("file:///C:/exp", "file:///C:/exp"),
    ],
)
def test_what_is_shown_of_an_address_says_where_and_nothing_secret(place: str, shown: str) -> None:
    assert url.shown(place) == shown


@pytest.mark.parametrize("place", ["runs/exp", "s3://", "file://", "file:///", "file://exp"])
def test_what_is_not_an_address_is_refused(place: str) -> None:
    with pytest.raises(UsageError, match=rf"'{place}' is not the address of a remote folder(.|\n)*s3://"):
        url.check(place)


def test_an_unknown_kind_of_address_is_refused() -> None:
    with pytest.raises(UsageError, match=r"nonsense:// is no filesystem that fsspec knows"):
        url.check("nonsense://exp")


def test_a_kind_of_address_that_a_script_has_made_known_is_taken() -> None:
    fsspec.register_implementation("mine", MemoryFileSystem, clobber=True)
    url.check("mine://exp")


@pytest.mark.parametrize(
    ("place", "package", "command"),
    [
        ("s3://exp", "s3fs", "pip install 'torch-resumable[s3]'"),
        ("gs://exp", "gcsfs", "pip install 'torch-resumable[gcs]'"),
        ("abfs://exp", "adlfs", "pip install 'torch-resumable[azure]'"),
        ("dropbox://exp", "dropboxdrivefs", "pip install dropboxdrivefs"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, place: str, package: str, command: str
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else found(name))
    monkeypatch.setattr(REGISTRY, "registry", {})
    with pytest.raises(UsageError, match=f"needs the package {package}(.|\n)*{re.escape(command)}"):
        url.check(place)


def test_an_address_whose_package_is_there_is_taken() -> None:
    url.check("file:///mnt/exp")
    url.check("memory://exp")


def test_without_paramiko_the_address_of_sftp_needs_sshfs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = "fsspec.implementations.sftp.SFTPFileSystem"
    monkeypatch.setattr(REGISTRY, "registry", {})
    monkeypatch.setattr(REGISTRY, "known_implementations", {"sftp": {"class": kind}})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs the package sshfs(.|\n)*torch-resumable\[sftp\]"):
        url.check("sftp://host/exp")


@pytest.mark.parametrize(
    "options",
    [
        {"secret": "hidden-1"},
        {"client_kwargs": {"aws_secret_access_key": "hidden-1"}},
        {"connection_string": "hidden-1"},
        {"headers": {"X-Api-Key": "hidden-1"}},
        {"headers": {"Authorization": "hidden-1"}},
        {"secretAccessKey": "hidden-1"},
        {"tokens": "hidden-1"},
    ],
)
def test_the_secrets_in_options_are_found(options: dict[str, object]) -> None:
    assert "hidden-1" in url.secrets_in("s3://bucket/exp", options)


@pytest.mark.parametrize(
    ("place", "secrets"),
    [
        ("sftp://ann:hid%20den@host/exp", ["hid%20den", "hid den"]),
        ("sftp://ann:hid/den@host/exp", ["hid/den"]),
        ("https://host/exp?token=hidden", ["token=hidden"]),
        ("sftp://[ann:hidden@host/exp", ["hidden"]),
    ],
)
def test_the_secrets_in_an_address_are_found(place: str, secrets: list[str]) -> None:
    assert {*secrets} <= {*url.secrets_in(place, {})}


def test_the_secrets_in_the_environment_are_found_and_no_other_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden-from-all")
    monkeypatch.setenv("HF_TOKEN", "hidden")
    monkeypatch.setenv("MY_KEY", "short")
    monkeypatch.setenv("PWD", "/home/ann")
    found = url.secrets_in("s3://bucket/exp", {"endpoint_url": "http://host", "anon": False, "key_count": 3})
    assert found.index("hidden-from-all") < found.index("hidden")
    assert not {"short", "/home/ann", "http://host"} & {*found}


def test_each_address_has_a_folder_of_its_own_which_can_be_moved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RESUMABLE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = url.cache_folder("s3://bucket/exp")
    assert folder.parent == tmp_path / "resumable"
    assert folder != url.cache_folder("s3://bucket-exp")
    assert folder == url.cache_folder("s3://bucket/exp/?token=other")
    assert len(url.cache_folder(f"s3://bucket/{'x' * 500}/end").name) < 100
    monkeypatch.setenv("RESUMABLE_CACHE", "~/mine")
    assert url.cache_folder("s3://bucket/exp").parent == Path.home() / "mine"
