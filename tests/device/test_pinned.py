"""Staging buffers with a device: pinned, and let go of."""

from __future__ import annotations

import logging

import pytest

from kvstore import Staging
from kvstore.errors import DeviceError
from tests.device.fake import CONTEXTS, PINNED, Fake


def test_buffers_are_pinned_once(fake: Fake) -> None:
    """A buffer is pinned when it is made, not again when it is reused, and let go of at close; then the context is released."""
    with Staging(1 << 16, chunk_bytes=4096, device=0, driver=fake.path) as staging:
        assert staging.device is not None
        assert staging.device.name == "pretended device 0"
        assert fake.live(PINNED) == 0
        for _ in range(5):
            buffers = staging.take_many(3)
            assert all(b.pinned for b in buffers)
            for buffer in buffers:
                staging.give(buffer)
        assert fake.live(PINNED) == fake.calls("cuMemHostRegister_v2") == 3
        assert fake.live(CONTEXTS) == 1
    assert fake.live(PINNED) == fake.live(CONTEXTS) == 0


def test_a_buffer_that_is_out_at_close(fake: Fake) -> None:
    """A buffer that is in use when the staging is closed stays pinned, and the device open, until it is given back."""
    staging = Staging(1 << 16, chunk_bytes=4096, device=0, driver=fake.path)
    out, idle = staging.take_many(2)
    staging.give(idle)
    staging.close()
    assert (fake.live(PINNED), fake.live(CONTEXTS)) == (1, 1)
    staging.give(out)
    assert (fake.live(PINNED), fake.live(CONTEXTS)) == (0, 0)


def test_one_dropped_without_close(fake: Fake) -> None:
    """A staging that nobody closed lets go of everything when it is collected."""
    staging = Staging(1 << 16, chunk_bytes=4096, device=0, driver=fake.path)
    staging.give(staging.take())
    del staging
    assert (fake.live(PINNED), fake.live(CONTEXTS)) == (0, 0)


def test_pinning_that_fails_once(fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    """When one of several buffers can't be pinned all are had, that one as plain memory: counted, and logged once."""
    fake.fail("cuMemHostRegister_v2", 2, 2)
    with Staging(1 << 16, chunk_bytes=4096, device=0, driver=fake.path) as staging:
        buffers = staging.take_many(3)
        assert [b.pinned for b in buffers] == [True, False, True]
        assert staging.unpinned == 1
        for buffer in buffers:
            staging.give(buffer)
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "CUDA_ERROR_OUT_OF_MEMORY" in caplog.text


def test_memory_that_the_driver_keeps(broken: Fake, caplog: pytest.LogCaptureFixture) -> None:
    """A retired buffer's place comes free, unless the driver keeps its memory: then it stays mapped and is gone from the budget."""
    with Staging(2 * 4096, chunk_bytes=4096, device=0, driver=broken.path) as staging:
        first, second = staging.take_many(2)
        staging.retire(first)
        assert broken.live(PINNED) == 1
        third = staging.take(0)
        assert third is not first
        broken.fail("cuMemHostUnregister")
        address = second.address
        staging.retire(second)
        assert "for ever" in caplog.text
        assert second.array.size == 0
        with open("/proc/self/maps") as lines:
            assert any(int(a, 16) <= address < int(b, 16) for a, b in (line.split()[0].split("-") for line in lines))
        with pytest.raises(TimeoutError, match="1 lost"):
            staging.take(0)
        staging.give(third)
    assert broken.complaints() == ["a context went before memory that is pinned for it"]


def test_a_device_that_was_released(fake: Fake) -> None:
    """A device is not to be held once its last holder has dropped it."""
    with Staging(1 << 16, chunk_bytes=4096, device=0, driver=fake.path) as staging:
        device = staging.device
    assert device is not None
    with pytest.raises(DeviceError, match="released"):
        device.hold()
