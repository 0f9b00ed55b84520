"""What may be relied on while a transfer is under way: what comes first, who waits for what, and what keeps what alive."""

from __future__ import annotations

import ctypes
import gc
import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import DeviceArray, Layout, Namespace, Staging, Store, Stream
from kvstore.errors import ArrayError, BlockDamaged, StagingBusyError, StagingClosedError, TransferCancelled, TransferTimeout
from kvstore.kernel import CudaDriver
from kvstore.leases import dlpack
from tests.device.arrays import DeviceMemory, Interface, Legacy, Versioned, in_form
from tests.device.fake import FILL, HELD_BACK, QUEUED, Fake
from tests.device.test_bytes import assert_restored
from tests.support import data_file, flip, plain_layout, run_child, save, wait_until

TOKENS = list(range(400))
LIMIT = 120.0


def layers(count: int = 4) -> Layout:
    """Streams of one chunk each: 400 rows of 8 bytes."""
    return Layout(streams=tuple(Stream(f"layer{i}", "u8", (8,)) for i in range(count)), block_tokens=16, model="layers")


def start(fake: Fake, namespace: Namespace, **options: Any) -> tuple[dict[str, DeviceMemory], Staging, Any]:
    """Begin a restore of all layers; the lease has ended when it returns."""
    layout = namespace.layout
    memories = {s.name: DeviceMemory(fake, s, 400) for s in layout.streams}
    staging = Staging(1 << 16, chunk_bytes=4096, device=0, driver=fake.path)
    with namespace.lease(TOKENS) as lease:
        given = {name: in_form(memory, "raw") for name, memory in memories.items()}
        return memories, staging, lease.to_device(given, staging=staging, **options)


def assert_all(memories: dict[str, DeviceMemory], layout: Layout) -> None:
    """Require that every layer is there."""
    for stream in layout.streams:
        assert_restored(memories[stream.name], stream, 400, TOKENS, layout)


@pytest.fixture
def namespace(store: Store) -> Namespace:
    """A namespace with a session of several layers."""
    made = store.namespace(layers())
    save(made, TOKENS)
    return made


def test_the_first_layer_comes_first(fake: Fake, namespace: Namespace) -> None:
    """Once the device has done the first layer's copy it can be waited for, while the others are under way; the lease is over."""
    fake.run_late(allowed=0)
    memories, staging, transfer = start(fake, namespace, ring=4)
    with staging, transfer:
        with pytest.raises(TransferTimeout, match=r"layer0.*0\.05 s"):
            transfer.wait("layer0", 0.05)
        assert not transfer.ready("layer0")
        fake.allow(3)  # a copy, the buffer's mark and the stream's
        transfer.wait("layer0", LIMIT)
        assert transfer.ready("layer0")
        assert_restored(memories["layer0"], namespace.layout.streams[0], 400, TOKENS, namespace.layout)
        assert not transfer.ready("layer1")
        assert (memories["layer3"].memory.bytes == FILL).all()
        fake.allow(-1)
        transfer.finish(LIMIT)
        assert transfer.ready("layer3")
    memories["layer0"].array[...] = 0  # already looked at
    for name in ("layer1", "layer2", "layer3"):
        assert not (memories[name].memory.bytes == FILL).all()


def test_a_wait_is_for_the_device(fake: Fake, namespace: Namespace) -> None:
    """A wait without a time limit returns when the device is done with the stream's copies, though all is queued long before."""
    fake.run_late(allowed=0)
    memories, staging, transfer = start(fake, namespace, ring=4)
    with staging, transfer:
        wait_until(lambda: fake.calls("cuEventSynchronize") == 1)  # the transfer's own wait, for the last of all
        seen: list[bool] = []

        def wait() -> None:
            transfer.wait("layer1")
            seen.append(bool((memories["layer1"].memory.bytes != FILL).any()))

        thread = threading.Thread(target=wait)
        thread.start()
        wait_until(lambda: fake.calls("cuEventSynchronize") == 2)
        assert not seen
        fake.allow(-1)
        thread.join(LIMIT)
        assert seen == [True]
        transfer.finish(LIMIT)
    assert_all(memories, namespace.layout)


def test_a_stream_waits_in_the_callers_stead(fake: Fake, namespace: Namespace) -> None:
    """With a CUDA stream a wait returns before the bytes are there, and what is queued on that stream runs after them."""
    device = CudaDriver.load(fake.path).device(0)
    mine = device.create_stream()
    fake.run_late(allowed=0)
    memories, staging, transfer = start(fake, namespace, ring=4)
    with staging, transfer:
        for name in transfer.names:
            transfer.wait(name, LIMIT, stream=mine)
        assert fake.asked(HELD_BACK) == 4
        assert fake.live(QUEUED) == 4
        assert not transfer.ready("layer0")
        fake.allow(-1)
        device.synchronize_stream(mine)
        assert_all(memories, namespace.layout)
        transfer.finish(LIMIT)
        transfer.wait("layer3", stream=mine)  # all is there: nothing to hold back
        assert fake.asked(HELD_BACK) == 4
    device.destroy_stream(mine)
    device.drop()


def test_on_the_callers_stream(fake: Fake, namespace: Namespace) -> None:
    """Copies on a stream of the caller's are on that stream alone, which stays his; nobody waits for what he queues behind."""
    device = CudaDriver.load(fake.path).device(0)
    mine = device.create_stream()
    created = fake.calls("cuStreamCreate")
    memories, staging, transfer = start(fake, namespace, stream=mine)
    with staging, transfer:
        transfer.finish(LIMIT)
    assert fake.calls("cuStreamCreate") == created
    assert fake.calls("cuStreamDestroy_v2") == fake.calls("cuStreamSynchronize") == 0
    assert_all(memories, namespace.layout)
    device.destroy_stream(mine)
    device.drop()


def test_work_on_the_destination_comes_before(fake: Fake, namespace: Namespace) -> None:
    """What a library has queued on an array before it handed it out is done before the array is overwritten."""
    device = CudaDriver.load(fake.path).device(0)
    theirs = device.create_stream()
    memory = DeviceMemory(fake, namespace.layout.streams[0], 400)
    zeros = np.zeros(4096, np.uint8)
    fake.run_late(allowed=0)
    device.copy(theirs, memory.pointer, zeros.__array_interface__["data"][0], 3200)  # their own initialising
    with Staging(1 << 16, chunk_bytes=4096, device=0, driver=fake.path) as staging, namespace.lease(TOKENS) as lease:
        with lease.to_device({"layer0": Interface(memory, stream=theirs)}, staging=staging) as transfer:
            fake.allow(-1)
            transfer.finish(LIMIT)
        assert_restored(memory, namespace.layout.streams[0], 400, TOKENS, namespace.layout)
    device.synchronize_stream(theirs)
    device.destroy_stream(theirs)
    device.drop()


def test_filling_goes_on_while_a_copy_is_under_way(fake: Fake, namespace: Namespace) -> None:
    """While the device has done nothing yet, as many chunks are filled and queued as the ring has buffers, and no more."""
    for ring in (1, 2, 3):
        fake.reset()
        fake.run_late(allowed=0)
        _, staging, transfer = start(fake, namespace, ring=ring)
        with staging, transfer:
            wait_until(lambda: fake.calls("cuEventSynchronize") == 1)
            assert fake.live(QUEUED) == ring == staging.in_use
            fake.allow(-1)
            transfer.finish(LIMIT)
        fake.assert_clean()


def test_cancelling_waits_for_the_device(fake: Fake, namespace: Namespace) -> None:
    """A cancelled transfer ends once the device is done with what was queued; only then the memory may be freed."""
    fake.run_late(allowed=0)
    memories, staging, transfer = start(fake, namespace)
    with staging:
        wait_until(lambda: fake.calls("cuEventSynchronize") == 1)
        ended = threading.Event()

        def cancel() -> None:
            transfer.cancel()
            ended.set()

        thread = threading.Thread(target=cancel)
        thread.start()
        assert not ended.wait(0.1)
        assert staging.in_use == 2
        fake.allow(-1)
        thread.join(LIMIT)
        assert ended.is_set()
        assert fake.live(QUEUED) == staging.in_use == 0
        for memory in memories.values():
            fake.free(memory.memory)
        for wait in (lambda: transfer.wait("layer3"), transfer.finish, lambda: transfer.ready("layer0")):
            with pytest.raises(TransferCancelled):
                wait()
        transfer.cancel()


def test_an_exception_in_the_block_cancels(fake: Fake, namespace: Namespace) -> None:
    """Leaving a transfer's block by an exception cancels it and lets the exception through."""
    memories, staging, transfer = start(fake, namespace)
    with staging:
        with pytest.raises(KeyError), transfer:
            raise KeyError("mine")
        for memory in memories.values():
            fake.free(memory.memory)
        assert staging.in_use == 0


def test_damage(fake: Fake, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """A damaged block's rows are not copied; the transfer fails by name, also for streams that had come, and gives all back."""
    layout = plain_layout()
    namespace = store.namespace(layout)
    save(namespace, TOKENS)
    with namespace.lease(TOKENS) as lease:
        block = lease.blocks[20]
        hurt = block.file_offset + layout.segments(16)[2] + 5
        position = block.start
        del block
    flip(data_file(store.path), hurt)
    memories = {s.name: DeviceMemory(fake, s, s.rows(400)) for s in layout.streams}
    given = {name: Versioned(memory) for name, memory in memories.items()}
    with Staging(1 << 16, chunk_bytes=4096, device=0, driver=fake.path) as staging:
        with namespace.lease(TOKENS) as lease, pytest.raises(BlockDamaged) as caught:
            transfer = lease.to_device(given, staging=staging)
            transfer.wait("t", LIMIT)
        assert caught.value.position == position
        for name in ("k", "pool"):
            with pytest.raises(BlockDamaged):
                transfer.wait(name)
        assert staging.in_use == 0
    assert_restored(memories["k"], layout.streams[0], 400, TOKENS, layout)
    assert (memories["t"].array[:, position : position + 16] == np.frombuffer(bytes([FILL] * 4), "<f4")[0]).all()
    assert (memories["pool"].memory.bytes == FILL).all()
    assert [c.given_back for array in given.values() for c in array.capsules] == [1] * 4
    del transfer, caught
    gc.collect()
    assert "nobody asked" not in caplog.text
    assert namespace.lease(TOKENS).length == position
    save(namespace, TOKENS)


def test_dropped_transfers(fake: Fake, namespace: Namespace, caplog: pytest.LogCaptureFixture) -> None:
    """A transfer that is dropped ends by itself, gives everything back and says so; one that was queued whole ends in silence."""
    fake.run_late(allowed=0)
    _, staging, transfer = start(fake, namespace)
    wait_until(lambda: fake.calls("cuEventSynchronize") == 1)
    del transfer
    gc.collect()
    fake.allow(-1)
    wait_until(lambda: not staging.in_use)
    assert "cancelled" in caplog.text
    caplog.clear()
    staging.close()
    memories, staging, transfer = start(fake, namespace, ring=4)
    for name in transfer.names:
        transfer.wait(name, LIMIT)
    del transfer
    gc.collect()
    staging.close()
    wait_until(lambda: not fake.live(0))
    assert_all(memories, namespace.layout)
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_an_error_that_nobody_asked_for(fake: Fake, namespace: Namespace, caplog: pytest.LogCaptureFixture) -> None:
    """The error of a transfer that was dropped is logged."""
    fake.fail("cuEventRecord", 3)
    _, staging, transfer = start(fake, namespace)
    wait_until(lambda: not staging.in_use and fake.calls("cuStreamDestroy_v2"))
    wait_until(lambda failed=transfer: "failed" in repr(failed))
    del transfer
    gc.collect()
    assert "nobody asked: DeviceError: cuEventRecord" in caplog.text
    staging.close()


def test_two_transfers_share_buffers(fake: Fake, namespace: Namespace) -> None:
    """Transfers that want more buffers together than there are come one after the other; one that waits too long says so."""
    layout = namespace.layout
    memories = [{s.name: DeviceMemory(fake, s, 400) for s in layout.streams} for _ in range(4)]
    with Staging(3 * 4096, chunk_bytes=4096, device=0, driver=fake.path) as staging:
        with namespace.lease(TOKENS) as lease:
            transfers = [lease.to_device({n: in_form(m, "raw") for n, m in each.items()}, staging=staging) for each in memories]
        for transfer in transfers:
            transfer.finish(LIMIT)
        for each in memories:
            assert_all(each, layout)
    with Staging(2 * 4096, chunk_bytes=4096, device=0, driver=fake.path, timeout=0.05) as staging:
        buffer = staging.take()
        with namespace.lease(TOKENS) as lease:
            transfer = lease.to_device({"layer0": in_form(memories[0]["layer0"], "raw")}, staging=staging)
            transfer.finish(LIMIT)  # one chunk needs one buffer
            transfer = lease.to_device({n: in_form(m, "raw") for n, m in memories[0].items()}, staging=staging)
            with pytest.raises(StagingBusyError, match="2 of 2"):
                transfer.finish(LIMIT)
        staging.give(buffer)


def test_a_wait_for_buffers_can_be_cancelled(fake: Fake, namespace: Namespace) -> None:
    """A transfer that waits for buffers is cancelled at once, not when its time is over; closing the buffers ends it too."""
    memory = DeviceMemory(fake, namespace.layout.streams[0], 400)
    staging = Staging(2 * 4096, chunk_bytes=4096, device=0, driver=fake.path, timeout=10 * LIMIT)
    buffers = staging.take_many(2)
    with namespace.lease(TOKENS) as lease:
        transfer = lease.to_device({"layer0": in_form(memory, "raw")}, staging=staging)
        transfer.cancel()
        with pytest.raises(TransferCancelled):
            transfer.finish()
        transfer = lease.to_device({"layer0": in_form(memory, "raw")}, staging=staging)
        staging.close()
        with pytest.raises(StagingClosedError):
            transfer.finish(LIMIT)
    for buffer in buffers:
        staging.give(buffer)


def test_the_interpreter_ends(built: Fake, tmp_path: Path) -> None:
    """A process whose device hangs for ever in the middle of a transfer still ends, and without a crash."""
    code = """
    from tests.device.fake import Fake
    from tests.device.arrays import DeviceMemory, in_form
    fake = Fake(Path(sys.argv[2]))
    fake.run_late(allowed=0)
    store = Store.open(sys.argv[1] + "/s", max_bytes=CAP)
    namespace = store.namespace(plain_layout())
    tokens = list(range(400))
    save(namespace, tokens)
    staging = Staging(1 << 16, chunk_bytes=4096, device=0, driver=fake.path)
    memory = DeviceMemory(fake, plain_layout().streams[0], 400)
    transfer = namespace.lease(tokens).to_device({"k": in_form(memory, "raw")}, staging=staging)
    wait_until(lambda: fake.calls("cuEventSynchronize"))
    print("under way")
    """
    assert run_child("from pathlib import Path\n" + code.replace("\n    ", "\n"), tmp_path, built.path) == "under way"


def assert_refused(namespace: Namespace, given: dict[str, Any], staging: Staging, match: str, **options: Any) -> None:
    """Require that destinations are refused at once."""
    with namespace.lease(TOKENS) as lease, pytest.raises(ArrayError, match=match):
        lease.to_device(given, staging=staging, **options)


def test_refusals(fake: Fake, store: Store) -> None:
    """What doesn't fit is refused by the stream's name before a byte moves, and what was lent is given back."""
    layout = plain_layout()
    namespace = store.namespace(layout)
    save(namespace, TOKENS)
    k, v, t, _ = layout.streams
    good = DeviceMemory(fake, v, 400)
    fake.devices(2)
    with Staging(1 << 16, chunk_bytes=4096, device=0, driver=fake.path) as staging:

        def refused(given: dict[str, Any], match: str, **options: Any) -> None:
            assert_refused(namespace, given, staging, match, **options)

        refused({"nope": in_form(good, "raw")}, "nope")
        refused({"v": np.zeros((400, 5), np.uint8)}, "'v'.*copy_into")
        refused({"v": object()}, "'v'.*none of DeviceArray")
        refused({"v": in_form(DeviceMemory(fake, v, 399), "raw")}, r"'v'.*\(400, 5\).*\(399, 5\)")
        refused({"v": in_form(DeviceMemory(fake, Stream("v", "u8", (6,)), 400), "raw")}, "'v'.*expected shape")
        refused({"v": in_form(DeviceMemory(fake, Stream("v", "f16", (5,)), 400), "raw")}, "'v'.*elements of 1 bytes")
        refused({"v": Interface(good, readonly=True)}, "'v'.*read-only")
        refused({"v": Versioned(good, flags=1)}, "'v'.*read-only")
        refused({"v": Versioned(good, flags=2)}, "'v'.*copy")
        refused({"v": Versioned(good, major=2)}, "'v'.*version is 2")
        refused({"v": Legacy(good, bits=4)}, "'v'.*4 bits")
        refused({"v": Legacy(good, kind=1)}, "'v'.*not in a CUDA device")
        elsewhere = DeviceMemory(fake, v, 400, ordinal=1)
        for form in ("raw", "interface", "legacy", "versioned"):
            refused({"v": in_form(elsewhere, form)}, "'v'.*device 1")
        host = np.zeros((400, 5), np.uint8)
        fake_pointer = in_form(good, "raw")
        address = host.__array_interface__["data"][0]
        refused({"v": DeviceArray(address, (400, 5), 1)}, "'v'.*no memory of a CUDA device")
        refused({"v": DeviceArray(0, (400, 5), 1)}, "'v'.*no address")
        beyond = DeviceArray(good.pointer + 8, (400, 5), 1)
        refused({"v": beyond}, "'v'.*no memory of a CUDA device")
        refused({"v": DeviceArray(good.pointer, (400, 5), 1, (5,))}, "'v'.*1 strides for 2 axes")
        refused({"v": DeviceArray(good.pointer, (400, 5), 1, (0, 1))}, "'v'.*rows apart")
        refused({"v": DeviceArray(good.pointer, (400, 5), 1, (1, 400))}, "'v'.*contiguous")
        refused({"v": DeviceArray(good.pointer + 1995, (400, 5), 1, (-5, 1))}, "'v'.*positive")
        wide = DeviceMemory(fake, Stream("w", "u8", (5, 400), 2), 1)
        refused({"k": DeviceArray(wide.pointer, (3, 400, 8), 2, (2, 16, 2))}, "'k'.*apart|overlap")
        same = DeviceMemory(fake, t, 800)
        refused(
            {"t": in_form(same, "raw"), "v": DeviceArray(same.pointer + 100, (400, 5), 1)},
            "overlap",
        )
        refused({"v": fake_pointer}, "ring of 0", ring=0)
        refused({"v": fake_pointer}, "ring of 17", ring=17)
        given = {"k": Versioned(DeviceMemory(fake, k, 400)), "t": Versioned(DeviceMemory(fake, t, 10))}
        refused(given, "'t'")
        assert given["k"].capsules[0].given_back == given["t"].capsules[0].given_back == 1
        assert staging.in_use == 0
    assert (good.memory.bytes == FILL).all()
    big = store.namespace(Layout(streams=(Stream("b", "u8", (1024,)),), block_tokens=16, model="big"))
    save(big, TOKENS)
    with Staging(1 << 16, chunk_bytes=4096, device=0, driver=fake.path) as staging:
        assert_refused(big, {"b": in_form(DeviceMemory(fake, big.layout.streams[0], 400), "raw")}, staging, r"chunk_bytes=16384")


def test_nothing_to_copy(fake: Fake, store: Store) -> None:
    """A miss, no destinations, and a stream that has no rows yet are done at once."""
    layout = plain_layout()
    namespace = store.namespace(layout)
    pool = DeviceMemory(fake, layout.streams[3], 1)
    with Staging(1 << 16, chunk_bytes=4096, device=0, driver=fake.path) as staging:
        for tokens in ([], TOKENS[:3]):
            if tokens:
                save(namespace, tokens)
            with namespace.lease(TOKENS) as lease, lease.to_device({"pool": in_form(pool, "raw")}, staging=staging) as transfer:
                assert lease.length == len(tokens)
                transfer.wait("pool", LIMIT)
                assert transfer.ready("pool")
                with pytest.raises(ArrayError, match="no stream 'k'"):
                    transfer.wait("k")
            with namespace.lease(TOKENS) as lease:
                lease.to_device({}, staging=staging).finish(LIMIT)
    assert (pool.memory.bytes == FILL).all()


def test_numpys_own_capsules_are_read() -> None:
    """The structures are read as a real producer writes them, with versions and without."""
    array = np.arange(24, dtype=np.int16).reshape(2, 3, 4)[:, 1:, ::2]

    class Old:
        def __dlpack__(self, stream: Any = None) -> Any:
            return array.__dlpack__(stream=stream)

    for given in (array, Old()):
        tensor = dlpack.consume(given, None)
        assert (tensor.pointer, tensor.shape) == (array.__array_interface__["data"][0], array.shape)
        assert (tensor.strides, tensor.itemsize, tensor.device_type, tensor.readonly) == (array.strides, 2, 1, False)
        tensor.release()
    array.flags.writeable = False
    tensor = dlpack.consume(array, None)
    assert tensor.readonly
    tensor.release()


@pytest.mark.parametrize(
    ("version", "bits", "lanes", "flags", "said"),
    [(2, 16, 1, 0, r"version is 2\.7,"), (1, 4, 3, 0, "4 bits x 3;"), (1, 16, 1, 2, "is a copy")],
)
def test_a_refused_capsule_is_given_back_last(version: int, bits: int, lanes: int, flags: int, said: str) -> None:
    """A producer may free what it described as soon as it has it back: the refusal says what was there before, and it has it."""
    described = dlpack._Versioned(major=version, minor=7, flags=flags)
    described.tensor.bits, described.tensor.lanes, described.tensor.device_type = bits, lanes, dlpack.CUDA
    given_back: list[int] = []

    def take_back(address: int) -> None:
        given_back.append(address)
        ctypes.memset(address, 0xEE, ctypes.sizeof(described))

    deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(take_back)
    described.deleter = ctypes.cast(deleter, ctypes.c_void_p).value
    arguments = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, *arguments)(("PyCapsule_New", ctypes.pythonapi))

    class Producer:
        def __dlpack__(self, **_: Any) -> Any:
            return new_capsule(ctypes.addressof(described), dlpack._VERSIONED_NAME, None)

    with pytest.raises(ValueError, match=said):
        dlpack.consume(Producer(), 1)
    assert given_back == [ctypes.addressof(described)]
