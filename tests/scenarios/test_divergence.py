"""One process extends a leaf while another, who matched it before, saves a divergence inside it; siblings that go meanwhile."""

from __future__ import annotations

from kvstore import Store
from tests.support import assert_restores, assert_sound, plain_layout, save

from .conftest import Acting
from .steps import assert_written_by

STEM = list(range(100, 140))  # two blocks of 16 and half of a third
LONGER = [*STEM, *range(7, 37)]
SETUP = """
import kvstore.saving.save as saving
namespace = store.namespace(plain_layout())
def named(salt):
    return store.namespace(plain_layout(), salt=salt.encode())
"""
CUTS = {"at a block's boundary": 32, "inside a block": 21, "in the tail": 37, "at the leaf's end": 40}


def branch_at(cut: int) -> list[int]:
    """A session that parts from the stem."""
    return [*STEM[:cut], *range(500, 530)]


def test_the_leaf_is_extended_under_a_divergence(store: Store, actor: Acting) -> None:
    """B has walked to the leaf, A extends it, then B's branch parts from what A has made of it: both have all their rows."""
    a, b = actor(SETUP), actor(SETUP + "halt(saving, 'stored_prefix', call=0, after=True)")
    for name, cut in CUTS.items():
        namespace = store.namespace(plain_layout(), salt=name.encode())
        save(namespace, STEM)
        b.start(f"save(named({name!r}), {branch_at(cut)}, writer=2).stored_tokens")
        b.until("stored_prefix")
        assert a.do(f"save(named({name!r}), {LONGER}, writer=1, start=32).new_tokens") == "30"
        assert_written_by(namespace, LONGER, [(40, 0), (70, 1)])
        assert_sound(store)
        b.go()
        assert b.answer() == str(cut)
        assert_written_by(namespace, LONGER, [(40, 0), (70, 1)])
        assert_written_by(namespace, branch_at(cut), [(cut, 0), (cut + 30, 2)])
        assert_sound(store)


def test_the_leaf_is_split_under_an_extension(store: Store, actor: Acting) -> None:
    """A has walked to the leaf it extends, B splits it, then A goes on from the part that kept the leaf's end."""
    a, b = actor(SETUP + "halt(saving, 'stored_prefix', call=0, after=True)"), actor(SETUP)
    for name, cut in CUTS.items():
        namespace = store.namespace(plain_layout(), salt=name.encode())
        save(namespace, STEM)
        a.start(f"save(named({name!r}), {LONGER}, writer=1, start=32).stored_tokens")
        a.until("stored_prefix")
        assert b.do(f"save(named({name!r}), {branch_at(cut)}, writer=2).new_tokens") == "30"
        assert_written_by(namespace, branch_at(cut), [(cut, 0), (cut + 30, 2)])
        assert_written_by(namespace, STEM, [(40, 0)])
        assert_sound(store)
        a.go()
        assert a.answer() == "40"
        assert_written_by(namespace, LONGER, [(40, 0), (70, 1)])
        assert_written_by(namespace, branch_at(cut), [(cut, 0), (cut + 30, 2)])
        assert_sound(store)


def test_the_sibling_of_a_divergence_is_evicted_by_another_process(store: Store, actor: Acting) -> None:
    """Two sessions part inside a block; one goes while the other is leased, then the common part is all that one can have."""
    namespace = store.namespace(plain_layout())
    save(namespace, LONGER)
    other = branch_at(37)
    save(namespace, other, writer=2, start=32)
    a = actor(SETUP)
    with namespace.lease(LONGER) as lease:
        assert lease.length == 70
        assert a.do(f"namespace.evict({LONGER}).tokens") == "33"
        assert_sound(store)
        lease.validate()  # what it pinned is there
    assert_written_by(namespace, other, [(37, 0), (67, 2)])
    assert_restores(namespace, LONGER, 37)
    assert a.do(f"save(namespace, {LONGER}, writer=1).stored_tokens") == "37"
    assert_written_by(namespace, LONGER, [(37, 0), (70, 1)])
    assert_sound(store)
    assert a.do(f"namespace.evict({other}).tokens") == "30"
    assert_written_by(namespace, LONGER, [(37, 0), (70, 1)])
    assert a.do(f"namespace.evict({LONGER}).tokens") == "70"
    assert store.stats().blocks == 0


def test_a_match_inside_a_block_of_a_session_that_is_being_evicted(store: Store, actor: Acting) -> None:
    """A prompt ends inside a block of the only session that has it, which another process evicts: leases hold, the next misses."""
    namespace = store.namespace(plain_layout())
    prompt = [*STEM[:37], 9, 9]
    save(namespace, STEM)
    evictor, reader = (
        actor(SETUP + "import kvstore.store.namespace as evicting\nhalt(evicting, 'evict_point', after=True)"),
        actor(SETUP),
    )
    found = namespace.match(prompt)
    assert found is not None
    assert found.length == 37
    with namespace.lease(prompt) as before:
        evictor.start(f"namespace.evict({STEM}).tokens")
        evictor.until("evict_point")  # gone in the transaction that is open, and in no other
        assert reader.do(f"restored(namespace, {prompt})") == "37"
        with namespace.lease(prompt) as during:
            evictor.go()
            assert evictor.answer() == "40"
            assert reader.do(f"restored(namespace, {prompt})") == "0"
            assert namespace.match(prompt) is None
            for lease in (before, during):
                assert lease.length == 37
                lease.validate()
            assert_sound(store)
    assert_restores(namespace, prompt, 0)
    assert store.stats().blocks == 0
