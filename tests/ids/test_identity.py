"""The hashes that name things are the same in every process and never collide across kinds."""

from kvstore import ids
from tests.support import plain_layout, run_child

NAMESPACE = bytes(range(32))


def test_identities_are_pinned() -> None:
    """Ids that are on disk keep their values: a changed derivation would make every stored session unreachable."""
    assert ids.fingerprint(b"layout").hex() == "6f9ebd541380b0af75d06cb247ead8780c1f399000e611fd27f75747bae3b37c"
    assert ids.salt_digest(b"").hex() == "537a1df3d1dbc480f83a0950a4910e93c59ab890cda435535f731987442221dd"
    assert ids.namespace_id(NAMESPACE, NAMESPACE[::-1]).hex() == "62134fea8fef3586625c70872a6f36bb0c82ccc0c5bcebc222b51b260708d05a"
    assert ids.block_domain(NAMESPACE).hex() == "72df6cb26d205c49af63c4d5d9d8f15554dccd57b756807828106def695f15c7"
    assert (
        ids.block_id(NAMESPACE, 1, 16, memoryview(b"payload")).hex()
        == "27c3d2470c88a237b6a45366879b891d5df21331e280fff7a8fc18b4e6fa2a33"
    )
    assert ids.image_tokens(bytes(16), 3).tolist() == [3325614988, 3704577877, 1905787799]


def test_identities_do_not_depend_on_the_process() -> None:
    """Another process, with another hash seed, derives the same fingerprint."""
    printed = run_child("print(plain_layout().fingerprint.hex())", "-")
    assert printed == plain_layout().fingerprint.hex()


def test_each_derivation_is_a_domain_of_its_own() -> None:
    """The same input hashed as a layout, a salt, a namespace and a domain gives four different ids."""
    both = bytes(64)
    derived = {ids.fingerprint(both), ids.salt_digest(both), ids.namespace_id(both[:32], both[:32]), ids.block_domain(both)}
    assert len(derived) == 4


def test_a_block_id_covers_kind_rows_length_and_payload() -> None:
    """Blocks that differ in any one of domain, kind, row count, length or one byte have different ids."""
    base = (NAMESPACE, 1, 16, b"payload")
    others = [
        (NAMESPACE[::-1], 1, 16, b"payload"),
        (NAMESPACE, 2, 16, b"payload"),
        (NAMESPACE, 1, 17, b"payload"),
        (NAMESPACE, 1, 16, b"payload\0"),
        (NAMESPACE, 1, 16, b"paylobd"),
    ]
    seen = {ids.block_id(domain, kind, tokens, memoryview(data)) for domain, kind, tokens, data in (base, *others)}
    assert len(seen) == 6
