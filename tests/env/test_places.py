"""Where LMDB's locks don't reach: other file systems, kernels and PID namespaces are refused by name; overlays and small disks."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import Store
from kvstore.env import entry, place
from kvstore.errors import CapError, KVStoreError, SharingError
from kvstore.locks import FileLock
from tests.support import CAP, PRELUDE, ROOT, assert_restores, assert_sound, child, child_at, plain_layout, run_child, save

TOKENS = list(range(40))
BOOT = Path("/proc/sys/kernel/random/boot_id")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a store with a session, closed: tests copy it."""
    path = tmp_path_factory.mktemp("places") / "s"
    with Store.open(path, max_bytes=CAP) as store:
        save(store.namespace(plain_layout()), TOKENS)
    return path


@pytest.fixture
def path(whole: Path, tmp_path: Path) -> Path:
    """Copy the store."""
    return Path(shutil.copytree(whole, tmp_path / "s"))


def mounted_as(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    """Have the system say that everything is on file systems of this type."""
    lines = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, behind = line.split(" - ", 1)
        lines.append(f"{before} - {kind} {behind.split(' ', 1)[1]}")
    (tmp_path / "mounts").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(place, "_MOUNTS", str(tmp_path / "mounts"))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("nfs4", "network"),
        ("cifs", "network"),
        ("ceph", "network"),
        ("gfs2", "other machines"),
        ("9p", "another kernel"),
        ("virtiofs", "another kernel"),
        ("fuse.sshfs", "process"),
        ("fuse.something-new", "process"),
        ("fuse", "process"),
    ],
)
def test_a_file_system_that_is_refused(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, why: str) -> None:
    """A store on a file system of another machine, kernel or process is refused before anything is made or opened there, unless
    the caller goes on at his own risk.
    """
    mounted_as(monkeypatch, tmp_path, kind)
    before = sorted((p.name, p.stat().st_mtime_ns) for p in path.iterdir())
    for where in (path, tmp_path / "new" / "deep"):
        with pytest.raises(SharingError, match=rf"type {kind}, .*{why}.*any_filesystem=True") as caught:
            Store.open(where, max_bytes=CAP)
        assert isinstance(caught.value, OSError)
    assert sorted((p.name, p.stat().st_mtime_ns) for p in path.iterdir()) == before
    assert not (tmp_path / "new").exists()
    with Store.open(path, any_filesystem=True) as store:
        assert_restores(store.namespace(plain_layout()), TOKENS, 40)
        store.resize(2 * CAP)  # opens it again on the same terms
        assert store.max_bytes == 2 * CAP


@pytest.mark.parametrize("kind", ["ext4", "tmpfs", "overlay", "fuseblk", "fuse.fuse-overlayfs", "brand-new"])
def test_a_file_system_that_is_local(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Local file systems open, and so do kernel file systems that nobody has heard of."""
    mounted_as(monkeypatch, tmp_path, kind)
    with Store.open(path) as store:
        assert_restores(store.namespace(plain_layout()), TOKENS, 40)


@pytest.mark.parametrize("mounts", ["/nowhere", "/dev/null", "garbage"])
def test_a_system_that_does_not_say(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mounts: str) -> None:
    """Without a readable list of mounts a store opens as ever."""
    (tmp_path / "garbage").write_bytes(b"\xff\n \n1 2 3\n- - -\n" * 3)
    monkeypatch.setattr(place, "_MOUNTS", str(tmp_path / mounts))
    assert place.file_system_of(str(path)) is None
    with Store.open(path) as store:
        assert_restores(store.namespace(plain_layout()), TOKENS, 40)


def unshared(arguments: list[str], script: str, *args: str | Path) -> str:
    """Run a shell script in namespaces of its own; skip where this machine forbids it."""
    command = ["unshare", *arguments]
    try:
        probe = subprocess.run([*command, "true"], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no unshare(1)")
    if probe.returncode:
        pytest.skip(f"this machine forbids namespaces: {probe.stderr.decode().strip()}")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "sh", "-ec", script, *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=env,
        timeout=120,
    )
    if done.returncode == 77:
        pytest.skip(f"this machine forbids mounts: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


OPENS = (
    PRELUDE
    + """
try:
    with Store.open(path) as store:
        print(restored(store.namespace(plain_layout()), list(range(40))), os.getpid() < 5)
        store._scope.environment.exclusive(0.0) and print("alone")
except KVStoreError as error:
    print(type(error).__name__, error)
"""
)


@pytest.mark.parametrize("proc", [[], ["--mount-proc"]])
def test_another_pid_namespace(path: Path, proc: list[str]) -> None:
    """A process of another PID namespace is refused while the store is in use here, and opens it when it is not; and we, then."""
    arguments = ["--pid", "--fork", *proc, *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    script = '"$0" -c "$1" "$2"'
    with Store.open(path) as store, store.namespace(plain_layout()).lease(TOKENS) as lease:
        printed = unshared(arguments, script, sys.executable, OPENS, path)
        assert printed.startswith("SharingError"), printed
        assert "PID namespace" in printed
        assert "shareProcessNamespace" in printed
        lease.validate()
        save(store.namespace(plain_layout()), [*TOKENS, 1])
        assert store._scope.environment.readers.oldest() is not None
        assert run_child("print(restored(Store.open(path).namespace(plain_layout()), list(range(40))))", path) == "40"
    assert unshared(arguments, script, sys.executable, OPENS, path) == "40 True\nalone"
    with Store.open(path) as store:
        assert_sound(store)


def test_we_come_second(path: Path) -> None:
    """While a process of another PID namespace has the store open it is refused here; when that has gone it opens."""
    code = """
    import subprocess
    inner = '''
    import sys
    from kvstore import Store
    store = Store.open(sys.argv[1])
    print("open", flush=True)
    sys.stdin.read()
    '''.replace("\\n    ", "\\n")
    command = ["unshare", "--pid", "--fork", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        print("forbidden", flush=True)
        sys.exit()
    holder = subprocess.Popen([*command, sys.executable, "-c", inner, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    print(holder.stdout.readline().decode().strip(), flush=True)
    sys.stdin.readline()
    holder.communicate()
    print("gone", flush=True)
    """
    process = child(code, path)
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        said = process.stdout.readline().strip()
        if said == "forbidden":
            pytest.skip("this machine forbids PID namespaces")
        assert said == "open"
        with pytest.raises(SharingError, match="another PID namespace"):
            Store.open(path)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline().strip() == "gone"
        with Store.open(path) as store:
            assert_restores(store.namespace(plain_layout()), TOKENS, 40)
    finally:
        process.kill()
        process.communicate()


HOLDER = """
store = Store.open(path)
print("open", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def in_use(path: Path) -> Iterator[Path]:
    """A store that another process has open."""
    with child_at(HOLDER, path):
        yield path


def test_another_kernel(in_use: Path) -> None:
    """A store that a process with another boot id holds is refused with both ids, and its files stay as they are."""
    lock = in_use / "open.lock"
    mine = BOOT.read_text().strip()
    assert mine in lock.read_text()
    other = lock.read_bytes().replace(mine[:8].encode(), b"00000000")
    lock.write_bytes(other)
    with pytest.raises(SharingError, match=rf"another kernel.*00000000.*{mine}"):
        Store.open(in_use)
    assert lock.read_bytes() == other


def test_a_lock_that_does_not_reach(path: Path) -> None:
    """Where another kernel could take the lock that is held here, and has written its name into it, the next write is refused."""
    lock = path / "open.lock"
    with Store.open(path) as store:
        namespace = store.namespace(plain_layout())
        lock.write_bytes(lock.read_bytes().replace(BOOT.read_text().strip()[:8].encode(), b"00000000"))
        with pytest.raises(SharingError, match="another kernel"):
            save(namespace, [1, 2, 3])
        assert_restores(namespace, TOKENS, 40)
    with Store.open(path) as store:  # the first opener writes down where it runs
        save(store.namespace(plain_layout()), [1, 2, 3])


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 400, b"kvstore-holder 1\n", b"kvstore-holder 2\nboot x\n", b"kvstore-holder 1\nboot", b"boot x\n"]
)
def test_what_a_holder_does_not_say(in_use: Path, content: bytes) -> None:
    """An open.lock that is empty, cut off or of another form refuses nobody: it says nothing of where its holder runs."""
    (in_use / "open.lock").write_bytes(content)
    with Store.open(in_use) as store:
        save(store.namespace(plain_layout()), [1, 2, 3])
    assert (in_use / "open.lock").read_bytes() == content


def test_a_file_of_somebody_else_is_not_written_to(tmp_path: Path) -> None:
    """A file that is called open.lock and holds something else keeps it."""
    (tmp_path / "open.lock").write_bytes(b"mine")
    with Store.open(tmp_path, max_bytes=CAP):
        pass
    assert (tmp_path / "open.lock").read_bytes() == b"mine"


def test_a_power_loss(path: Path) -> None:
    """Zeros in open.lock, as a power loss may leave them, are written over by the first opener."""
    (path / "open.lock").write_bytes(bytes(100))
    with Store.open(path):
        assert BOOT.read_text().strip() in (path / "open.lock").read_text()


def test_it_is_never_empty(tmp_path: Path) -> None:
    """What is written into a lock file is put over what was there: a disk without room, or a kill, doesn't leave it empty."""
    lock, seen, done = FileLock(str(tmp_path / "lock")), set(), threading.Event()
    contents = [b"kvstore-holder 1\nboot %d\n" % n for n in (1, 22, 3)]
    lock.write(contents[0])

    def look() -> None:
        while not done.is_set():
            seen.add((tmp_path / "lock").read_bytes())

    thread = threading.Thread(target=look)
    thread.start()
    for turn in range(3000):
        lock.write(contents[turn % 3])
    done.set()
    thread.join()
    assert b"" not in seen
    assert lock.read(100) == contents[2]
    lock.close()


def test_without_proc(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system doesn't say which kernel and namespace this is, a store opens, and claims to be nowhere."""
    monkeypatch.setattr(entry, "_BOOT", "/nowhere")
    monkeypatch.setattr(entry, "_NAMESPACE", "/nowhere")
    with Store.open(path) as store:
        assert (path / "open.lock").read_bytes() == b"kvstore-holder 1\n"
        assert run_child("print(restored(Store.open(path).namespace(plain_layout()), list(range(40))))", path) == "40"
        assert_sound(store)


OVERLAID = """
layout, tokens = plain_layout(), list(range(40))
lower = os.stat(path + "/data.mdb").st_ino
with Store.open(path) as store:
    namespace = store.namespace(layout)
    lease = namespace.lease(tokens)
    save(namespace, tokens + [1])
    lease.validate()
    assert os.fstat(store._scope.environment._data_fd).st_ino == os.stat(path + "/data.mdb").st_ino
    assert_restores(namespace, tokens + [1], 41)
    with Store.open(path) as again:
        assert again._scope is store._scope
    print(run_child("with Store.open(path) as s: print(restored(s.namespace(plain_layout()), list(range(40)) + [1]))", path))
    pid = os.fork()
    if not pid:
        with Store.open(path) as own:
            assert_restores(own.namespace(layout), tokens + [1], 41)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    lease.close()
    assert_sound(store)
with Store.open(path) as store:
    assert_restores(store.namespace(layout), tokens + [1], 41)
    store.resize(CAP // 2)
    assert_sound(store)
print("moved" if os.stat(path + "/data.mdb").st_ino != lower else "same")
"""


@pytest.mark.parametrize("lower", ["disk", "tmpfs"])
def test_on_an_overlay(path: Path, tmp_path: Path, lower: str) -> None:
    """A store in the lower layer of an overlay opens, saves and restores in the upper one; the lower one keeps every byte."""
    (tmp_path / "o").mkdir()
    script = """
        cd "$3"
        mkdir l u w m
        if [ "$4" = tmpfs ]; then mount -t tmpfs none l || exit 77; fi
        cp -a "$2" l/s
        before=$(cksum < l/s/data.mdb)
        mount -t overlay overlay -o lowerdir=l,upperdir=u,workdir=w m || exit 77
        "$0" -c "$1" "$3/m/s"
        test "$before" = "$(cksum < l/s/data.mdb)"
    """
    arguments = ["-m", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    printed = unshared(arguments, script, sys.executable, PRELUDE + OVERLAID, path, tmp_path / "o", lower)
    assert printed.split()[0] == "41"


def test_a_disk_without_room_for_the_cap(tmp_path: Path) -> None:
    """A new store whose cap the disk can't hold is refused with both numbers before anything is made; so is raising a cap."""
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    asked = min(2 * free, 1 << 44)
    assert asked > free
    for where in (tmp_path / "s", tmp_path):
        with pytest.raises(CapError, match=rf"{asked}.* \d+ bytes free"):
            Store.open(where, max_bytes=asked)
    assert list(tmp_path.iterdir()) == []
    with Store.open(tmp_path / "s", max_bytes=CAP) as store:
        save(store.namespace(plain_layout()), TOKENS)
        with pytest.raises(CapError, match=rf"{asked}.*bytes free"):
            store.resize(asked)
        assert store.max_bytes == CAP
        assert_restores(store.namespace(plain_layout()), TOKENS, 40)
    with Store.open(tmp_path / "s", max_bytes=CAP) as store:
        assert_sound(store)


SMALL = """
import logging
logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stdout)
try:
    Store.open(path, max_bytes=CAP)
except errors.CapError as error:
    print(type(error).__name__, CAP, str(CAP) in str(error))
with Store.open(path, max_bytes=CAP // 2) as store:
    save(store.namespace(plain_layout()), list(range(40)))
with open(path + "/../fill", "wb") as file:
    try:
        while True:
            file.write(bytes(1 << 16))
            file.flush()
    except OSError:
        pass
print("filled")
with Store.open(path) as store, Store.open(path):
    print(restored(store.namespace(plain_layout()), list(range(40))))
"""


def test_a_disk_that_has_filled_up(tmp_path: Path) -> None:
    """A store on a disk that is full by now opens and restores, and says so once in the log, with the numbers."""
    script = 'mount -t tmpfs -o size=12m none "$2" || exit 77; "$0" -c "$1" "$2/s"'
    arguments = ["-m", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    lines = unshared(arguments, script, sys.executable, PRELUDE + SMALL, tmp_path).splitlines()
    assert lines[0] == f"CapError {CAP} True"
    filled = lines.index("filled")
    assert len(lines) == filled + 3
    assert lines[filled + 1].startswith("WARNING")
    assert f"cap of {CAP // 2} bytes" in lines[filled + 1]
    assert " 0 free" in lines[filled + 1]
    assert lines[filled + 2] == "40"


def test_a_disk_with_room_says_nothing(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A store whose disk has room for its cap logs nothing when it opens."""
    with caplog.at_level(logging.WARNING, "kvstore"), Store.open(path):
        pass
    assert not caplog.records


def test_the_error_is_one_of_ours() -> None:
    """What refuses a place is an error of the package's and an OSError."""
    assert issubclass(SharingError, KVStoreError)
    assert issubclass(SharingError, OSError)
