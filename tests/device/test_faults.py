"""When a call of the driver fails, at whatever time: a named error or a line in the log, nothing left over, nothing hung."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from kvstore import Namespace, Staging, Store
from kvstore.errors import DeviceError, DriverMissingError, KVStoreError
from kvstore.kernel import CudaDriver
from tests.device.arrays import DeviceMemory, Interface, in_form
from tests.device.fake import CALLS, CONTEXTS, EVENTS, PINNED, STREAMS, Fake, build
from tests.device.test_bytes import assert_restored
from tests.support import plain_layout, run_child, save

TOKENS = list(range(400))
LIMIT = 120.0  # seconds after which something hangs


def saved(store: Store) -> Namespace:
    """A namespace with a session in it."""
    namespace = store.namespace(plain_layout())
    save(namespace, TOKENS)
    return namespace


def restore(fake: Fake, namespace: Namespace) -> int:
    """One restore, from opening the device to closing it, with a destination that names a stream; returns buffers in use."""
    memories = {s.name: DeviceMemory(fake, s, s.rows(400) + 3) for s in plain_layout().streams}
    given = {name: Interface(memory, stream=1) for name, memory in memories.items()}
    staging = Staging(1 << 16, chunk_bytes=4096, device=0, driver=fake.path)
    try:
        with namespace.lease(TOKENS) as lease, lease.to_device(given, staging=staging) as transfer:
            for name in transfer.names:
                transfer.wait(name, LIMIT)
            transfer.finish(LIMIT)
        for stream in plain_layout().streams:
            assert_restored(memories[stream.name], stream, 400, TOKENS, plain_layout())
        return staging.in_use
    finally:
        staging.close()


@pytest.mark.parametrize("call", CALLS)
def test_each_call_in_turn(broken: Fake, store: Store, call: str, caplog: pytest.LogCaptureFixture) -> None:
    """A call that fails at its first, second, ... time raises or is logged, by name; nothing is lost."""
    namespace = saved(store)
    assert restore(broken, namespace) == 0
    broken.assert_clean()
    often = broken.calls(call)
    assert often > 0, "the restore never makes this call"
    for nth in {*range(1, min(often, 12) + 1), often - 1, often} - {0}:
        broken.reset()
        broken.fail(call, nth)
        caplog.clear()
        try:
            with caplog.at_level(logging.DEBUG, "kvstore"):
                assert restore(broken, namespace) == 0
            assert call in caplog.text or broken.calls(call) < nth, f"the {nth}th failure left no trace"
        except DeviceError as error:
            assert (error.call, error.code, error.name) == (call, 999, "CUDA_ERROR_UNKNOWN")
            assert call in str(error)
        assert [broken.live(what) for what in (CONTEXTS, STREAMS, EVENTS)] == [0, 0, 0], (call, nth)
        if call == "cuMemHostUnregister":  # the driver keeps it, so the memory stays mapped
            assert broken.live(PINNED) == 1
        else:
            broken.assert_clean()
    assert namespace.lease(TOKENS).length == 400


def test_pairs_with_a_wait_that_fails(broken: Fake, store: Store) -> None:
    """When a copy fails and then waiting for the others fails too, there is a second way to wait; nothing is left over."""
    namespace = saved(store)
    for call in ("cuMemcpy2DAsync_v2", "cuMemcpyHtoDAsync_v2", "cuEventCreate"):
        broken.reset()
        broken.fail(call, 5 if call == "cuEventCreate" else 2)
        broken.fail("cuStreamSynchronize", 1, for_good=True)
        with pytest.raises(DeviceError, match=call):
            restore(broken, namespace)
        assert broken.calls("cuCtxSynchronize") == 1
        broken.assert_clean()


def test_a_lost_context(broken: Fake, store: Store) -> None:
    """When every call fails from some time on, as after a fault on the device, there is a named error and nothing hangs."""
    namespace = saved(store)
    restore(broken, namespace)
    for nth in range(1, 160, 7):
        broken.reset()
        broken.fail("*", nth, 700, for_good=True)
        try:
            restore(broken, namespace)
        except DeviceError as error:
            assert error.code == 700
            assert "restart the process" in str(error)
    broken.reset()
    assert restore(broken, namespace) == 0
    broken.assert_clean()


def test_the_context_of_the_caller_stays(fake: Fake, store: Store) -> None:
    """A restore leaves no context current, and takes none away that was."""
    namespace = saved(store)
    assert fake.current() is None
    restore(fake, namespace)
    assert fake.current() is None
    driver = CudaDriver.load(fake.path)
    device = driver.device(0)
    fake.fail("cuMemHostRegister_v2")
    with Staging(8192, chunk_bytes=4096, device=0, driver=fake.path) as staging:
        staging.give(staging.take())
    assert fake.current() is None
    device.drop()


def test_no_driver(tmp_path: Path) -> None:
    """On a machine without the driver everything but the last hop works, and that is refused by name."""
    code = """
    from kvstore.errors import DriverMissingError
    from kvstore.kernel import CudaDriver
    for path in (None, "/no/such/libcuda.so.1"):
        try:
            CudaDriver.load(path)
        except DriverMissingError as error:
            assert isinstance(error, (RuntimeError, OSError))
            print("libcuda" in str(error), "do without a device" in str(error))
    staging = Staging(1 << 20, chunk_bytes=4096)
    assert staging.device is None
    buffer = staging.take()
    assert not buffer.pinned and buffer.address % 4096 == 0
    store = Store.open(sys.argv[1] + "/s", max_bytes=CAP)
    namespace = store.namespace(plain_layout())
    save(namespace, list(range(50)))
    with namespace.lease(list(range(50))) as lease:
        try:
            lease.to_device({"v": object()}, staging=staging)
        except errors.DeviceError as error:
            print(error)
    """
    lines = run_child(code, tmp_path).splitlines()
    if lines[0] == "True True":  # else this machine has a driver
        assert lines[1] == "True True"
        assert "no device" in lines[2]


@pytest.mark.parametrize("call", ["cuInit", "cuMemcpy2DAsync_v2", "cuEventDestroy_v2"])
def test_a_function_is_missing(tmp_path: Path, call: str) -> None:
    """A driver that lacks a function is refused by the function's name."""
    path = build(tmp_path, "libcuda.so.1", f"-D{call}=renamed_{call}")
    with pytest.raises(DriverMissingError, match=call):
        CudaDriver.load(str(path))


@pytest.mark.parametrize(("call", "code"), [("cuInit", 803), ("cuDeviceGetCount", 999), ("cuInit", 100)])
def test_a_driver_that_does_not_start(fake: Fake, tmp_path: Path, call: str, code: int) -> None:
    """A driver that fails to start is a named error with what to do; the next try starts anew."""
    other = Fake(Path(shutil.copy(fake.path, tmp_path / "other.so")))
    other.fail(call, 1, code)
    with pytest.raises(DeviceError, match=call) as caught:
        CudaDriver.load(other.path)
    assert caught.value.code == code
    assert isinstance(caught.value, DriverMissingError) is (code == 100)
    assert CudaDriver.load(other.path).devices == 1
    assert CudaDriver.load(other.path) is CudaDriver.load(other.path)


def test_no_device(fake: Fake, tmp_path: Path) -> None:
    """A driver without a device is named; a device of a number that there is not, too."""
    other = Fake(Path(shutil.copy(fake.path, tmp_path / "other.so")))
    other.devices(0)
    with pytest.raises(DriverMissingError, match="CUDA_VISIBLE_DEVICES"):
        CudaDriver.load(other.path)
    with pytest.raises(DeviceError, match="CUDA_ERROR_INVALID_DEVICE"):
        Staging(1 << 20, chunk_bytes=4096, device=5, driver=fake.path)


def test_nothing_is_pinned(fake: Fake, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Where memory can't be pinned the restore goes on from plain memory, with one warning, and the buffers are counted."""
    namespace = saved(store)
    fake.fail("cuMemHostRegister_v2", 1, 2, for_good=True)
    memory = DeviceMemory(fake, plain_layout().streams[0], 400)
    with Staging(1 << 16, chunk_bytes=4096, device=0, driver=fake.path) as staging:
        with namespace.lease(TOKENS) as lease:
            lease.to_device({"k": in_form(memory, "raw")}, staging=staging).finish(LIMIT)
        assert_restored(memory, plain_layout().streams[0], 400, TOKENS, plain_layout())
        assert staging.unpinned == 2
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "ulimit -l" in warnings[0].message


def test_every_error_has_the_root() -> None:
    """Device errors are caught by the root of all errors, and by the builtins that fit."""
    assert issubclass(DeviceError, (KVStoreError, RuntimeError))
    assert issubclass(DriverMissingError, OSError)
