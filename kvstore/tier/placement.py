"""Where in a prompt the engine is worth stopping at, so that its states can be saved there."""

from __future__ import annotations

from kvstore.radix import CheckpointPolicy, nodes, walk
from kvstore.scope import NamespaceScope

__all__ = ["find_pauses"]


def find_pauses(scope: NamespaceScope, prompt: bytes, reused: int, *, index: bool) -> tuple[int, ...]:
    """Positions behind `reused` at which to save while a prompt is computed, ascending.

    Of a layout without states that is the prompt's end: rows can be cut anywhere. With states it is, by the namespace's policy,
    each multiple of `every`, the position at which the prompt leaves what another session has stored (not without looking at the
    `index`), and the turn's boundary.
    """
    length, policy = len(prompt) // 4, scope.policy
    if not scope.layout.states:
        return (length,) if length > reused else ()
    end = length - policy.boundary
    found = {end}
    if policy.every:
        found.update(range((reused // policy.every + 1) * policy.every, end, policy.every))
    if index and policy.at_branches and reused < end:
        found.add(_branch(scope, prompt, reused, policy))
    return tuple(sorted(p for p in found if reused < p <= end))


def _branch(scope: NamespaceScope, prompt: bytes, reused: int, policy: CheckpointPolicy) -> int:
    """Where the prompt leaves another session that goes on, 0 if it doesn't or states there would save too little."""
    with scope.store.environment.reading() as txn:
        path = walk(txn, scope.root(txn), prompt, tolerant=True)
        at, bad = path.matched, scope.store.bad(txn)
        last = max((c.position for _, c in path.checkpoints() if bad.isdisjoint(c.ids)), default=0)
        if at - max(last, reused) < policy.least_gain:
            return 0
        goes_on = path.inside or (bool(path.nodes) and nodes.has_children(txn, path.nodes[-1].node))
        return at if goes_on else 0
