"""Engines that are broken in one way each, and what the suite has to say about them; and some that are right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvstore import Layout
from kvstore.testing import EngineDriver, HashEngine

from .broken import (
    CountsItself,
    CountsItsRestores,
    Deaf,
    DropsAWholeLastBlock,
    DropsTheTail,
    GoesToTheSavedEnd,
    HiddenCounter,
    KeepsAMixture,
    KeepsItsStateToItself,
    KeepsStatesAtReset,
    KeepsStatesAtResetAfterARestore,
    LayoutOfTheMoment,
    LeavesChunksOut,
    LooksAtTheShapeOnly,
    Moody,
    NeverResets,
    OneMemory,
    OnePositionShort,
    RangesInOnePlace,
    ReadsChunksLate,
    ReadsTheFirstRowsOnly,
    RemembersTheLongest,
    Restarts,
    RewritesThePast,
    StaysWithItsOwn,
    SwallowsErrors,
    SwallowsErrorsInChunks,
    SwallowsErrorsInRanges,
    Throws,
    WindowAsRows,
    forgetful,
    unread,
)
from .broken_captures import (
    AlwaysHandsOutStates,
    CaptureDisturbs,
    IgnoresTheStart,
    LeavesAStreamOut,
    LosesRestoredRows,
    NotInPlaceYet,
    OneScratchForAll,
)
from .broken_hybrids import DeadKeyElsewhere, UnreadDrafter, Unshifted, forgetful_hybrid
from .drivers import EMPTY, EXTENSION, HYBRID, PLAIN, RECURRENT, HashDriver, HybridDriver
from .whole import ExtensionTypes, HandsOutViews, InChunks, InPages, InRanges, PartByPart

__all__ = ["GOOD", "MUTANTS", "Mutant"]


@dataclass(frozen=True)
class Mutant:
    """One broken engine: what drives it, the check that has to fail, and what it has to say among other things."""

    driver: EngineDriver[Any]
    check: str
    says: str


def _hash(kind: Callable[[Layout], HashEngine], layout: Layout = HYBRID) -> HashDriver:
    return HashDriver(layout, kind)


GOOD: dict[str, EngineDriver[Any]] = {
    "plain": HashDriver(PLAIN),
    "hybrid": HashDriver(HYBRID),
    "recurrent": HashDriver(RECURRENT),
    "views": _hash(HandsOutViews, PLAIN),
    "views with states": _hash(HandsOutViews),
    "part by part": _hash(PartByPart),
    "pages": _hash(InPages),
    "ranges": _hash(InRanges),
    "ranges, no states": _hash(InRanges, PLAIN),
    "chunks": _hash(InChunks),
    "chunks, no states": _hash(InChunks, PLAIN),
    "extension types": _hash(ExtensionTypes, EXTENSION),
}

_FRESH = "a fresh engine after a restore: at position"


def _forgetful_hybrid(name: str) -> Mutant:
    # the dead key stands behind the last pooled row, so that it is seen through both
    also = ", index.dead" if name == "index.pooled" else ""
    return Mutant(HybridDriver(forgetful_hybrid(name)), "round_trip", f"{_FRESH} 161 {name}{also} differ: {name} (")


MUTANTS: dict[str, Mutant] = {
    **{
        f"forgets {name}": Mutant(_hash(forgetful(name)), "round_trip", f"{_FRESH} 41 {name} differ: {name} (")
        for name in ("k", "v", "pool", "r", "window", "blob")
    },
    **{
        f"forgets {name}, no states": Mutant(_hash(forgetful(name), PLAIN), "round_trip", f"41 {name} differ: {name} (row 0")
        for name in ("k", "vt", "pool")
    },
    **{
        f"never reads {name}": Mutant(_hash(unread(name)), "negative_controls", f"omission of {name} would go unnoticed")
        for name in ("k", "v", "pool", "r", "window", "blob")
    },
    "never reads a stream, no states": Mutant(_hash(unread("vt"), PLAIN), "negative_controls", "omission of vt"),
    "never reads a state, no streams": Mutant(_hash(unread("conv"), RECURRENT), "negative_controls", "omission of conv"),
    "reads the first rows only": Mutant(_hash(ReadsTheFirstRowsOnly, PLAIN), "negative_controls", "its last row"),
    "looks at the shape only": Mutant(_hash(LooksAtTheShapeOnly), "negative_controls", "omission of window would"),
    "has nothing to lose at 41": Mutant(HashDriver(EMPTY), "negative_controls", "omission of window would go unnoticed: it has no"),
    "counts its restores": Mutant(_hash(CountsItsRestores), "negative_controls", "the bytes that are stored"),
    "never reads k, in ranges": Mutant(_hash(unread("k", InRanges)), "negative_controls", "omission of k would go unnoticed"),
    "ranges in one place": Mutant(_hash(RangesInOnePlace), "round_trip", f"{_FRESH} 41 k, v, pool differ: k (row 0; 41"),
    "swallows errors in ranges": Mutant(_hash(SwallowsErrorsInRanges), "failed_apply", "would go on with a mixture"),
    "never reads k, in chunks": Mutant(_hash(unread("k", InChunks)), "negative_controls", "omission of k would go unnoticed"),
    "reads chunks late": Mutant(_hash(ReadsChunksLate), "round_trip", f"{_FRESH} 41 k, v, pool differ: k (row 0; 9 of 41"),
    "leaves chunks out": Mutant(_hash(LeavesChunksOut), "round_trip", "took a restored prefix without"),
    "swallows errors in chunks": Mutant(_hash(SwallowsErrorsInChunks), "failed_apply", "would go on with a mixture"),
    "a window as rows": Mutant(_hash(WindowAsRows, PLAIN), "offered_positions", "v differ: v (row"),
    "stays with its own": Mutant(_hash(StaysWithItsOwn), "round_trip", "goes on from a restore differently"),
    "one position short": Mutant(_hash(OnePositionShort), "round_trip", "goes on from a restore differently"),
    "drops the tail": Mutant(_hash(DropsTheTail), "round_trip", "v (row 32; 9 of 41 rows)"),
    "drops a whole last block": Mutant(_hash(DropsAWholeLastBlock), "block_boundaries", "v (row 0; 16 of 16 rows)"),
    "a hidden counter": Mutant(_hash(HiddenCounter), "round_trip", "goes on from a restore differently"),
    "moody": Mutant(_hash(Moody), "round_trip", "holds something that its layout doesn't name"),
    "remembers the longest": Mutant(_hash(RemembersTheLongest), "dirty_engine", "something longer before goes on differently"),
    "goes to the saved end": Mutant(
        _hash(GoesToTheSavedEnd, PLAIN), "offered_positions", "a used engine, restored for a prompt of"
    ),
    "keeps its state to itself": Mutant(
        _hash(KeepsItsStateToItself, PLAIN),
        "offered_positions",
        "for a prompt of 15 tokens, goes on differently: at position",
    ),
    "rewrites the past": Mutant(_hash(RewritesThePast, PLAIN), "shared_prefix", "position 41 v differ: v (row 23"),
    "keeps its states at a reset": Mutant(_hash(KeepsStatesAtReset), "reset_forgets", "reset after something longer"),
    "never resets": Mutant(_hash(NeverResets, PLAIN), "reset_forgets", "reset after something longer"),
    "keeps restored states at a reset": Mutant(_hash(KeepsStatesAtResetAfterARestore), "reset_forgets", "reset after a restore"),
    "keeps a mixture": Mutant(_hash(KeepsAMixture), "failed_apply", "a restore failed at k, and the prompt was read anew"),
    "swallows errors": Mutant(_hash(SwallowsErrors), "failed_apply", "the engine would go on with a mixture"),
    "ignores the start": Mutant(_hash(IgnoresTheStart), "capture_in_pieces", "against all at once: k, v, pool differ"),
    "always hands out states": Mutant(_hash(AlwaysHandsOutStates), "capture_in_pieces", "too much"),
    "not in place yet": Mutant(_hash(NotInPlaceYet), "overwritten_at_once", "before the engine was overwritten: at position"),
    "one scratch for all": Mutant(_hash(OneScratchForAll), "round_trip", "41 k, v differ"),
    "capture disturbs": Mutant(_hash(CaptureDisturbs), "capture_twice", "against the first: r differ"),
    "leaves a stream out": Mutant(_hash(LeavesAStreamOut), "round_trip", "missing ['v']"),
    "loses restored rows": Mutant(_hash(LosesRestoredRows), "restored_twice", "against one that wasn't: v differ"),
    "counts itself": Mutant(_hash(CountsItself), "same_layout", "two layouts"),
    "layout of the moment": Mutant(_hash(LayoutOfTheMoment), "same_layout", "two layouts"),
    "throws dice": Mutant(_hash(Throws), "deterministic", "two engines that read the same in the same batches"),
    "deaf": Mutant(_hash(Deaf), "deterministic", "nothing could be told apart"),
    "one memory": Mutant(_hash(OneMemory, PLAIN), "two_at_once", "while another one reads something else: at position"),
    "restarts": Mutant(_hash(Restarts), "reset_forgets", "reset after something longer"),
    **{
        f"hybrid forgets {name}": _forgetful_hybrid(name)
        for name in (
            "attn.3.k",
            "attn.47.v_scale",
            "drafter.v",
            "index.pooled",
            "gdn.0.state",
            "gdn.46.conv",
            "index.tail",
            "index.block_pos",
            "index.dead",
            "ple.history",
            "last_token",
            "drafter.ring",
            "drafter.ring_at",
        )
    },
    "hybrid never reads the ring": Mutant(HybridDriver(UnreadDrafter), "negative_controls", "omission of drafter.ring would"),
    "hybrid without the shift": Mutant(
        HybridDriver(Unshifted), "round_trip", f"{_FRESH} 161 drafter.k, drafter.v differ: drafter.k (row 0"
    ),
    "hybrid's dead key elsewhere": Mutant(HybridDriver(DeadKeyElsewhere), "round_trip", f"{_FRESH} 161 index.pooled differ"),
}
