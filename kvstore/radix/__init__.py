"""The radix index: the tree over token prefixes by which the longest stored prefix of a prompt is found."""

from kvstore.radix import checkpoints, nodes, unfinished
from kvstore.radix.grow import Grown, NodeLimit, grow
from kvstore.radix.policy import CheckpointPolicy
from kvstore.radix.remove import Removed, cut_node, remove_leaf, remove_point
from kvstore.radix.sweep import Swept, find_disagreements, set_right, sweep
from kvstore.radix.walk import Path, cut_damage, walk

__all__ = [
    "CheckpointPolicy",
    "Grown",
    "NodeLimit",
    "Path",
    "Removed",
    "Swept",
    "checkpoints",
    "cut_damage",
    "cut_node",
    "find_disagreements",
    "grow",
    "nodes",
    "remove_leaf",
    "remove_point",
    "set_right",
    "sweep",
    "unfinished",
    "walk",
]
