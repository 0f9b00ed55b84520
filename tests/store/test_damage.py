"""Damaged blocks: refused from the moment they are seen, by every process after the next write, and healed by the next save."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore import Layout, Namespace, Store
from kvstore.errors import BlockDamaged
from kvstore.records.block import header_bytes
from kvstore.testing import destination, session_rows, session_states, states_equal
from tests.support import (
    CAP,
    assert_restores,
    assert_sound,
    data_file,
    flip,
    hybrid_layout,
    plain_layout,
    restored,
    restored_at_last,
    run_child,
    save,
)

TOKENS = list(range(100))


def offsets(namespace: Namespace, tokens: list[int]) -> list[int]:
    """Give the file offsets of the payloads of a session's blocks."""
    with namespace.lease(tokens) as lease:
        assert lease.length == len(tokens)
        return [block.file_offset for block in lease.blocks]


def state_offset(namespace: Namespace, tokens: list[int]) -> int:
    """Give the file offset of the payload of a checkpoint's first block."""
    from kvstore.blocks import find

    from .index import nodes_on

    [checkpoint] = [c for n in nodes_on(namespace, tokens) for c in n.checkpoints if c.position == len(tokens)]
    with namespace.scope.store.environment.reading() as txn:
        ref = find(txn, checkpoint.ids[0])
    assert ref is not None
    return ref.offset


@pytest.fixture
def opened(path: Path) -> Store:
    """Open a store that the test leaves damaged."""
    return Store.open(path, max_bytes=CAP)


@pytest.mark.parametrize("block", [0, 2, 5, 6])
@pytest.mark.parametrize("way", ["copy", "validate"])
def test_a_flipped_payload_byte_is_refused(opened: Store, block: int, way: str) -> None:
    """One flipped byte in a payload raises BlockDamaged with its id and position, and from then on a match ends before it."""
    with opened as store:
        namespace = store.namespace(plain_layout())
        save(namespace, TOKENS)
        ids = [b.block_id for b in namespace.lease(TOKENS).blocks]
        flip(data_file(store.path), offsets(namespace, TOKENS)[block] + 7)
        with namespace.lease(TOKENS) as lease:
            assert lease.length == 100
            with pytest.raises(BlockDamaged, match=f"position {16 * block}") as caught:
                lease.copy_into(destination(plain_layout(), 100)) if way == "copy" else lease.validate()
        assert (caught.value.block_id, caught.value.position) == (ids[block], 16 * block)
        assert isinstance(caught.value, OSError)
        assert_restores(namespace, TOKENS, 16 * block)
        assert store.stats().bad_blocks == 1
        assert store.stats().counters.damaged_blocks == 1


@pytest.mark.parametrize("where", ["magic", "id", "sums", "tokens"])
def test_a_flipped_header_byte_is_refused(opened: Store, where: str) -> None:
    """A byte flipped in a block's header makes the match shorter at once: a lease doesn't start on it."""
    layout = plain_layout()
    with opened as store:
        namespace = store.namespace(layout)
        save(namespace, TOKENS)
        start = offsets(namespace, TOKENS)[3] - header_bytes(len(layout.streams))
        flip(data_file(store.path), start + {"magic": 0, "id": 20, "tokens": 80, "sums": 97}[where])
        assert_restores(namespace, TOKENS, 48)
        save(namespace, TOKENS)
        assert_restores(namespace, TOKENS, 100)
        assert_sound(store)


def test_a_flipped_byte_of_one_stream_is_found_when_that_stream_is_copied(opened: Store) -> None:
    """Copying a stream checks that stream; copying another one does not depend on it."""
    layout = plain_layout()
    with opened as store:
        namespace = store.namespace(layout)
        save(namespace, TOKENS)
        flip(data_file(store.path), offsets(namespace, TOKENS)[1] + layout.segments(16)[1])  # the first row of "v"
        into = destination(layout, 100)
        with namespace.lease(TOKENS) as lease:
            lease.copy_into({"k": into["k"]})
            with pytest.raises(BlockDamaged, match="'v'"):
                lease.copy_into({"v": into["v"]})
        assert into["k"].tobytes() == session_rows(layout, TOKENS)["k"].tobytes()


@pytest.mark.parametrize("way", ["states", "validate"])
def test_a_flipped_state_byte_falls_back_to_the_checkpoint_before(opened: Store, way: str) -> None:
    """A damaged block of states is refused, a match answers the checkpoint before it, and the next save heals it."""
    with opened as store:
        namespace = store.namespace(hybrid_layout())
        save(namespace, TOKENS[:60])
        save(namespace, TOKENS)
        flip(data_file(store.path), state_offset(namespace, TOKENS) + 70)
        with namespace.lease(TOKENS) as lease:
            assert lease.length == 100
            lease.copy_into(destination(hybrid_layout(), 100))  # the rows are whole
            with pytest.raises(BlockDamaged, match="position 100"):
                lease.states() if way == "states" else lease.validate()
        assert_restores(namespace, TOKENS, 60)
        save(namespace, TOKENS)
        assert_restores(namespace, TOKENS, 100)
        assert_sound(store)


def test_other_states_heal_as_well(opened: Store) -> None:
    """When the engine's states come out otherwise than the damaged ones, they take their place, and nothing is left over."""
    with opened as store:
        namespace = store.namespace(hybrid_layout())
        save(namespace, TOKENS)
        blocks = store.stats().blocks
        flip(data_file(store.path), state_offset(namespace, TOKENS) + 70)
        assert restored_at_last(namespace, TOKENS) == 0
        states = session_states(hybrid_layout(), TOKENS, writer=2)
        namespace.save(TOKENS, session_rows(hybrid_layout(), TOKENS), states=states)
        with namespace.lease(TOKENS) as lease:
            assert lease.length == 100
            assert states_equal(lease.states(), states)
        assert (store.stats().blocks, store.stats().bad_blocks) == (blocks, 0)
        assert_sound(store)


def test_a_flipped_state_header_falls_back_too(opened: Store) -> None:
    """A damaged header of a block of states is noticed when the lease is taken."""
    with opened as store:
        namespace = store.namespace(hybrid_layout())
        save(namespace, TOKENS[:60])
        save(namespace, TOKENS)
        flip(data_file(store.path), state_offset(namespace, TOKENS) - header_bytes(1) + 20)
        assert_restores(namespace, TOKENS, 60)
        save(namespace, TOKENS)
        assert_restores(namespace, TOKENS, 100)
        assert_sound(store)


@pytest.mark.parametrize("layout", [plain_layout(), hybrid_layout()], ids=["plain", "hybrid"])
@pytest.mark.parametrize("block", [0, 3, 6])
def test_the_next_save_heals(opened: Store, layout: Layout, block: int) -> None:
    """A save that produces a damaged block's bytes stores them anew: the session is whole again and nothing is left over."""
    with opened as store:
        namespace = store.namespace(layout)
        save(namespace, TOKENS)
        blocks = store.stats().blocks
        flip(data_file(store.path), offsets(namespace, TOKENS)[block] + 3)
        restored_at_last(namespace, TOKENS)
        assert store.stats().bad_blocks == 1
        result = save(namespace, TOKENS)
        assert result.stored_tokens == 16 * block
        assert_restores(namespace, TOKENS, 100)
        stats = store.stats()
        assert (stats.bad_blocks, stats.blocks) == (0, blocks)
        assert stats.counters.healed_blocks == 1
        assert_sound(store)


def test_a_longer_save_heals_on_its_way(opened: Store) -> None:
    """A save of a longer session heals what is damaged of its prefix, and adds what is new."""
    with opened as store:
        namespace = store.namespace(plain_layout())
        save(namespace, TOKENS)
        for block in (1, 4):
            flip(data_file(store.path), offsets(namespace, TOKENS)[block] + 3)
        assert restored_at_last(namespace, TOKENS) == 16
        longer = [*TOKENS, *range(1000, 1030)]
        save(namespace, longer)
        assert_restores(namespace, longer, 130)
        assert_sound(store)


def test_a_damaged_tail_heals_as_it_grows(opened: Store) -> None:
    """A damaged tail is replaced by the block that a longer save makes of it."""
    with opened as store:
        namespace = store.namespace(plain_layout())
        save(namespace, TOKENS)
        flip(data_file(store.path), offsets(namespace, TOKENS)[6] + 1)
        assert restored_at_last(namespace, TOKENS) == 96
        longer = [*TOKENS, *range(1000, 1030)]
        save(namespace, longer, start=96)
        assert_restores(namespace, longer, 130)
        assert_sound(store)


def test_a_block_of_two_sessions_is_healed_for_both(opened: Store) -> None:
    """A damaged block to which two sessions refer, one as its tail, is refused for both and healed for both by one save."""
    with opened as store:
        namespace = store.namespace(plain_layout())
        other = [*TOKENS[:40], *[7] * 30]  # parts inside the third block
        save(namespace, TOKENS)
        save(namespace, other)
        flip(data_file(store.path), offsets(namespace, TOKENS)[2] + 1)
        assert restored_at_last(namespace, TOKENS) == 32
        assert_restores(namespace, TOKENS[:40], 32)
        assert_restores(namespace, other, 70)  # its own third block is another one
        save(namespace, TOKENS)
        assert_restores(namespace, TOKENS, 100)
        assert_restores(namespace, TOKENS[:40], 40)
        assert_restores(namespace, other, 70)
        assert_sound(store)


def test_a_block_shared_by_two_sessions_is_healed_by_either(opened: Store) -> None:
    """When a common block is damaged, a save of the second session makes the first one whole too."""
    with opened as store:
        namespace = store.namespace(plain_layout())
        other = [*TOKENS[:64], *[7] * 30]
        save(namespace, TOKENS)
        save(namespace, other)
        flip(data_file(store.path), offsets(namespace, TOKENS)[1] + 1)
        assert restored_at_last(namespace, other) == 16
        assert_restores(namespace, TOKENS, 16)
        save(namespace, other)
        assert_restores(namespace, other, 94)
        assert_restores(namespace, TOKENS, 100)
        assert_sound(store)


def test_another_writers_rows_heal_as_well(opened: Store) -> None:
    """When the engine's rows come out otherwise than the damaged ones, the session is whole, with one writer's rows a block."""
    with opened as store:
        namespace = store.namespace(plain_layout())
        save(namespace, TOKENS, writer=1)
        flip(data_file(store.path), offsets(namespace, TOKENS)[2] + 1)
        with pytest.raises(BlockDamaged):
            restored(namespace, TOKENS, writer=1)
        save(namespace, TOKENS, writer=2)
        into = destination(plain_layout(), 100)
        with namespace.lease(TOKENS) as lease:
            assert lease.length == 100
            lease.copy_into(into)
        first, second = (session_rows(plain_layout(), TOKENS, writer=w)["v"] for w in (1, 2))
        assert into["v"][:32].tobytes() == first[:32].tobytes()
        assert into["v"][32:48].tobytes() == second[32:48].tobytes()
        assert_sound(store)


MATCH = """
with Store.open(path) as store:
    found = store.namespace(plain_layout()).match(list(range(100)))
    print(0 if found is None else found.length, store.stats().bad_blocks)
"""


def test_other_processes_refuse_it_after_the_next_write(opened: Store, path: Path) -> None:
    """Damage that one process saw is refused by the others after its next write, whatever that was; a save elsewhere heals it."""
    with opened as store:
        namespace = store.namespace(plain_layout())
        save(namespace, TOKENS)
        flip(data_file(path), offsets(namespace, TOKENS)[2] + 1)
        assert restored_at_last(namespace, TOKENS) == 32
        assert run_child(MATCH, path) == "100 0"  # a match reads no payload, and this process has written nothing yet
        save(namespace, [5, 5, 5])
        assert run_child(MATCH, path) == "32 1"
        run_child("with Store.open(path) as store: save(store.namespace(plain_layout()), list(range(100)))", path)
        assert_restores(namespace, TOKENS, 100)
        assert_sound(store)


def test_closing_carries_the_mark(opened: Store, path: Path) -> None:
    """Damage that was seen before a close is still refused when the store is opened again."""
    with opened as store:
        namespace = store.namespace(plain_layout())
        save(namespace, TOKENS)
        flip(data_file(path), offsets(namespace, TOKENS)[2] + 1)
        assert restored_at_last(namespace, TOKENS) == 32
    with Store.open(path) as store:
        assert store.stats().bad_blocks == 1
        assert_restores(store.namespace(plain_layout()), TOKENS, 32)


def test_verify_names_and_refuses(opened: Store) -> None:
    """A deep verification names each damaged block, a shallow one a damaged header; what they named is refused."""
    with opened as store:
        namespace = store.namespace(plain_layout())
        save(namespace, TOKENS)
        where = offsets(namespace, TOKENS)
        ids = [b.block_id for b in namespace.lease(TOKENS).blocks]
        assert store.verify(deep=True).blocks == 7
        flip(data_file(store.path), where[5] + 100)
        assert store.verify().ok
        seen: list[str] = []
        deep = store.verify(deep=True, progress=lambda what, done, total: seen.append(what))
        assert [p.block_id for p in deep.problems] == [ids[5]]
        assert not deep.ok
        assert set(seen) == {"nodes", "blocks"}
        assert_restores(namespace, TOKENS, 80)
        flip(data_file(store.path), where[1] - 4080 + 9)
        shallow = store.verify()
        assert len(shallow.problems) >= 1
        assert_restores(namespace, TOKENS, 16)
        save(namespace, TOKENS)
        assert_restores(namespace, TOKENS, 100)
        assert_sound(store)


def test_a_padding_byte_is_no_damage_to_a_restore(opened: Store) -> None:
    """Bytes between the header and the payload belong to nothing: flipping one changes no answer."""
    with opened as store:
        namespace = store.namespace(plain_layout())
        save(namespace, TOKENS)
        flip(data_file(store.path), offsets(namespace, TOKENS)[2] - 100)
        assert_restores(namespace, TOKENS, 100)


def test_an_evicted_damaged_session_leaves_nothing(opened: Store) -> None:
    """Evicting a session with a damaged block takes the block and its mark."""
    with opened as store:
        namespace = store.namespace(hybrid_layout())
        save(namespace, TOKENS)
        flip(data_file(store.path), offsets(namespace, TOKENS)[2] + 1)
        assert restored_at_last(namespace, TOKENS) == 0
        save(namespace, [9] * 5)
        assert store.stats().bad_blocks == 1
        namespace.evict(TOKENS)
        assert store.stats().bad_blocks == 0
        save(namespace, TOKENS)
        assert_restores(namespace, TOKENS, 100)
        assert_sound(store)


def test_the_extension_of_a_damaged_tail_takes_the_given_rows(opened: Store) -> None:
    """When the stored tail fails its checks as a save builds on it, the rows given take its place instead of damaged ones."""
    with opened as store:
        namespace = store.namespace(plain_layout())
        save(namespace, TOKENS[:90])
        flip(data_file(store.path), offsets(namespace, TOKENS[:90])[5] + 1)
        save(namespace, TOKENS, start=80)  # has to read the tail, and meets the damage
        assert_restores(namespace, TOKENS, 100)
        assert_sound(store)
