"""Disk space taken ahead: never behind where a save can come, never the last of a disk, and no byte of a file is touched."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from kvstore import Store
from kvstore.env.reserve import Reservation
from tests.support import assert_restores, assert_sound, child, child_at, data_file, wait_until, wide_layout
from tests.support import save as save_session

MIB = 1 << 20


def taken(path: Path) -> int:
    """Bytes that a file takes on disk."""
    return path.stat().st_blocks * 512


def reservation(path: Path, start: int, stop: int) -> Reservation:
    """Begin one for a file as it is."""
    there = path.stat()
    return Reservation(str(path), (there.st_dev, there.st_ino), start, stop)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Make a file of 1 MiB on a file system that can reserve."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(MIB))
    probe = tmp_path / "probe"
    probe.touch()
    reservation(probe, 0, MIB).ahead(0)
    if not taken(probe):
        pytest.skip("this file system reserves nothing, or is nearly full")
    return path


def test_step_by_step_up_to_the_end(path: Path) -> None:
    """Blocks are reserved in steps, the next one shortly before it is needed, none behind the end; the file stays as it is."""
    before = path.read_bytes()
    room = reservation(path, MIB, 100 * MIB)
    room.ahead(MIB)
    assert 65 * MIB <= taken(path) < 66 * MIB
    room.ahead(30 * MIB)
    assert taken(path) < 66 * MIB
    room.ahead(60 * MIB)
    assert 100 * MIB <= taken(path) < 101 * MIB
    room.ahead(99 * MIB)
    room.ahead(200 * MIB)
    assert taken(path) < 101 * MIB
    assert path.read_bytes() == before


def test_another_file_in_its_place(path: Path) -> None:
    """A file that was replaced, is a link or is gone is left alone, and nothing is raised."""
    room = reservation(path, MIB, 9 * MIB)
    path.rename(path.with_name("old"))
    room.ahead(MIB)  # it is gone
    path.write_bytes(b"another")
    Reservation(str(path), (1, 2), 0, 9 * MIB).ahead(0)
    link = path.with_name("link")
    link.symlink_to("old")
    there = path.with_name("old").stat()
    Reservation(str(link), (there.st_dev, there.st_ino), MIB, 9 * MIB).ahead(MIB)
    assert taken(path) < MIB
    assert taken(path.with_name("old")) < 2 * MIB


@pytest.mark.parametrize(("size", "reserved"), [("2g", 32 * MIB), ("400m", 0)])
def test_the_last_space_is_left_to_others(tmp_path: Path, size: str, reserved: int) -> None:
    """Where a step would be more than a sixteenth of what is free, nothing is reserved, and a save works all the same."""
    code = """
    from kvstore.env.reserve import Reservation
    from pathlib import Path
    probe = Path(path) / "probe"
    probe.touch()
    there = probe.stat()
    Reservation(str(probe), (there.st_dev, there.st_ino), 0, 32 << 20).ahead(0)
    print(probe.stat().st_blocks * 512)
    probe.unlink()
    with Store.open(Path(path) / "s", max_bytes=64 << 20) as store:
        namespace = store.namespace(wide_layout())
        save(namespace, list(range(2000)))
        assert_restores(namespace, list(range(2000)), 2000)
    """
    mounted = f'mount -t tmpfs -o size={size} none "$0" && exec "$@"'
    try:
        probe = subprocess.run(["unshare", "-m", "sh", "-c", mounted, str(tmp_path), "true"], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no unshare(1)")
    if probe.returncode:
        pytest.skip(f"this machine does not let tests mount: {probe.stderr.decode().strip()}")
    with child(code, tmp_path) as process:
        process.kill()
        command = [*process.args] if isinstance(process.args, list) else []
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mounted, str(tmp_path), *map(str, command)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, str(reserved)), done.stderr


@pytest.mark.usefixtures("path")
def test_what_a_killed_save_leaves(tmp_path: Path) -> None:
    """Blocks that a killed save had reserved stay within the cap, are no damage, and are what the next save grows into."""
    cap, store_path, tokens = 48 * MIB, tmp_path / "s", list(range(2400))  # of 16 KiB: 37.5 MiB
    with Store.open(store_path, max_bytes=cap):
        pass
    code = """
    with Store.open(path) as store:
        print("open", flush=True)
        save(store.namespace(wide_layout(16384)), list(range(2400)))
    """
    data = data_file(store_path)
    with child_at(code, store_path) as process:
        wait_until(lambda: data.stat().st_size > 8 * MIB)
        process.kill()
        process.communicate()
    assert data.stat().st_size < taken(data) <= cap
    with Store.open(store_path) as store:
        namespace = store.namespace(wide_layout(16384))
        assert store.stats().file_bytes <= cap
        assert_sound(store)
        save_session(namespace, tokens)
        assert_restores(namespace, tokens, len(tokens))
        assert_sound(store)
    assert taken(data) <= cap


@pytest.mark.usefixtures("path")
def test_free_pages_are_used_first(tmp_path: Path) -> None:
    """A save that fits into pages that are free already reserves nothing."""
    tokens = list(range(1800))
    with Store.open(tmp_path / "s", max_bytes=64 * MIB) as store:
        namespace = store.namespace(wide_layout(16384))
        save_session(namespace, tokens)
        namespace.evict(tokens)
        save_session(namespace, [1])  # what one transaction freed can be used by the next but one
        data = data_file(tmp_path / "s")
        before, held = store._scope.environment.end_bytes(), taken(data)
        room = store._scope.environment.reservation(800)
        room.ahead(before)
        save_session(namespace, [7] * 1500)
        assert store._scope.environment.end_bytes() == before
        assert taken(data) == held
