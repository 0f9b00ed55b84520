"""The layers of a cache: what one may hold, and what of it is a row for each token, a window, a state, or always the same.

Everything that a layer holds is put into one of these classes, by name. What fits none of them is refused: an attribute that a
later version of Transformers adds is an error, never something left out in silence.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from transformers import cache_utils

from kvstore.adapters.transformers.tensors import label_of
from kvstore.errors import ArrayError, LayoutError
from kvstore.layout import State, Stream

__all__ = ["LayerForm", "Part", "cut", "learn_layer"]

Kind: TypeAlias = Literal["rows", "window", "state"]

# The layers that are taken, exactly: a class derived from one of them may hold more, or mean something else
_CLASSES = (
    "DynamicLayer",
    "DynamicSlidingWindowLayer",  # chunked attention as well
    "DynamicIndexedLayer",
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
    "DummyLayer",
)

# Tensors with a token axis, and their names in a layout: (name, batch axis, token axis)
_ROWS = {
    "keys": ("k", 0, 2),
    "values": ("v", 0, 2),
    "indexer_keys": ("index", 0, 1),
    "indexer_position_ids": ("index_position", 1, 2),
}
# Tensors without, one (as in Transformers 5.12) or a dict of them by number
_STATES = {"conv_states": "conv", "recurrent_states": "recurrent"}
_LENGTH = "cumulative_length"  # how many tokens a sliding layer has seen
_WINDOW = "sliding_window"
_RECORDS = "record_past"  # a layer that does so keeps more than the model reads next, see `cut`; a restored one doesn't
_UNCROPPED = "recurrent_states"  # `crop` shortens everything else, and leaves these of a later position
_DEVICES = {"device", "indexer_device"}  # where the model's own layer lies; a cache on another device is as good
_DERIVED = {"_sliding_window_tensor"}  # made from the configuration


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of a layer.

    Attributes
    ----------
    name : str
        Of its stream or state in a layout: `k.3`, `window_v.0`, `recurrent.1.0`.
    attribute : str
        Of the layer.
    index : int or None
        Its number, where the attribute is a dict of tensors.
    kind : str
        "rows": a row for each token. "window": the last rows only. "state": no token axis.
    dtype : torch.dtype
    device : torch.device
    shape : tuple of int
        Without the batch axis; 0 along the token axis.
    batch_axis : int
        In the tensor.
    token_axis : int
        Without the batch axis; -1 for states.
    window : int
        The most rows that a window has.
    """

    name: str
    attribute: str
    index: int | None
    kind: Kind
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    batch_axis: int = 0
    token_axis: int = -1
    window: int = 0

    def stream(self) -> Stream:
        """Describe rows for a layout."""
        row = self.shape[: self.token_axis] + self.shape[self.token_axis + 1 :]
        return Stream(self.name, label_of(self.dtype), row, self.token_axis)

    def state(self) -> State:
        """Describe a window or a state for a layout: a window is bounded, since it isn't full at first."""
        if self.kind == "window":
            return State(self.name, label_of(self.dtype), self.extent(self.window), (self.token_axis,))
        return State(self.name, label_of(self.dtype), self.shape)

    def extent(self, rows: int) -> tuple[int, ...]:
        """Give the shape with so many rows, without the batch axis."""
        return (*self.shape[: self.token_axis], rows, *self.shape[self.token_axis + 1 :])

    def of(self, layer: object) -> torch.Tensor | None:
        """Take the tensor from a layer; None where there is none yet."""
        held = getattr(layer, self.attribute, None)
        tensor: torch.Tensor | None = held.get(self.index) if isinstance(held, dict) else held
        return tensor

    def put(self, layer: object, tensor: torch.Tensor) -> None:
        """Let a layer hold the tensor, given without its batch axis."""
        whole = tensor.unsqueeze(self.batch_axis)
        if self.index is None:
            setattr(layer, self.attribute, whole)
        else:
            getattr(layer, self.attribute)[self.index] = whole


@dataclass(frozen=True, slots=True)
class LayerForm:
    """What one layer of a model's cache holds.

    Attributes
    ----------
    kind : type
        The layer's class.
    parts : tuple of Part
        Its tensors.
    constants : tuple of (str, object) pairs
        Its other attributes, which no token changes.
    devices : tuple of (str, torch.device) pairs
        Those that say where it lies.
    counts : bool
        Whether it counts its tokens.
    """

    kind: type
    parts: tuple[Part, ...]
    constants: tuple[tuple[str, Any], ...]
    devices: tuple[tuple[str, Any], ...]
    counts: bool

    def check(self, layer: object, number: int, length: int) -> None:
        """Refuse a layer that holds anything else than one of this form does after `length` tokens.

        Raises
        ------
        ArrayError
            Says of which layer what was found, and what was expected.
        """
        if type(layer) is not self.kind:
            raise ArrayError(
                f"layer {number} is a {type(layer).__name__}, the model's own cache has a {self.kind.__name__} there; make the "
                "cache with DynamicCache(config=model.config)"
            )
        held = vars(layer)
        if held.get(_RECORDS) and any(part.attribute == _UNCROPPED for part in self.parts):
            raise ArrayError(
                f"layer {number} records its past, so the cache may have been cropped, and Transformers' crop leaves recurrent "
                "states where they were: which position they are of can't be told; save one that doesn't record"
            )
        for part in self.parts:
            _check_tensor(part, part.of(layer), length, more=bool(held.get(_RECORDS)))
        if self.counts and held.get(_LENGTH) != length:
            raise ArrayError(f"layer {number} has seen {held.get(_LENGTH)} tokens, expected {length} tokens")
        expected = dict(self.constants)
        for name, value in _others(layer, number, {(part.attribute, part.index) for part in self.parts}, ArrayError):
            if name not in expected or value != expected[name]:
                raise ArrayError(
                    f"layer {number}: {name} is {value!r}, expected {expected.get(name, 'no such attribute')!r}: this is no cache "
                    "that the model has filled with one sequence"
                )

    def fill(self, layer: object, length: int, tensors: dict[str, torch.Tensor]) -> None:
        """Give a new layer what it holds after `length` tokens. The tensors are given by part's name, without batch axes."""
        for name, value in (*self.constants, *self.devices):
            setattr(layer, name, copy.copy(value))  # dicts belong to one layer each
        if self.counts:
            setattr(layer, _LENGTH, length)
        for part in self.parts:
            part.put(layer, tensors[part.name])


def learn_layer(layer: object, number: int) -> LayerForm:
    """Learn the form of a layer that has seen one token.

    Raises
    ------
    LayoutError
        When the layer, or something in it, is of a kind that the adapter doesn't take.
    """
    known = [kind for name in _CLASSES if (kind := getattr(cache_utils, name, None)) is not None]
    if type(layer) not in known:
        raise LayoutError(
            f"layer {number} of the model's cache is a {type(layer).__name__}, which this adapter doesn't take; taken are "
            f"{', '.join(kind.__name__ for kind in known)}"
        )
    parts = tuple(_parts(layer, number))
    counts = _LENGTH in vars(layer)
    constants = tuple(_others(layer, number, {(part.attribute, part.index) for part in parts}, LayoutError))
    devices = tuple((name, value) for name, value in vars(layer).items() if name in _DEVICES)
    form = LayerForm(type(layer), parts, constants, devices, counts)
    try:
        form.check(layer, number, 1)
    except ArrayError as error:
        raise LayoutError(f"after one token the model's cache isn't what it should be: {error}") from error
    return form


def cut(part: Part, tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """View what is stored of a part after `stop` tokens: the rows from `start` on, or the whole state. Without batch axis.

    A layer that records its past (to be cropped, after speculative steps) keeps rows and columns in front of those that the
    model reads next. They are left out, as cropping by nothing leaves them out.
    """
    one = tensor.select(part.batch_axis, 0)
    if part.kind == "rows":
        return one.narrow(part.token_axis, start, stop - start)
    if part.kind == "window":
        rows = min(stop, part.window)
        return one.narrow(part.token_axis, one.shape[part.token_axis] - rows, rows)
    columns = part.shape[-1]
    return one if one.shape[-1] == columns else one[..., one.shape[-1] - columns :]


def _parts(layer: object, number: int) -> Iterator[Part]:
    held = vars(layer)
    window = int(held[_WINDOW]) if _WINDOW in held else 0
    if _WINDOW in held and window < 2:
        raise LayoutError(f"layer {number} has a sliding window of {window}, which keeps no rows; the least is 2")
    for attribute, (name, batch, axis) in _ROWS.items():
        tensor = held.get(attribute)
        if tensor is None:
            continue
        axis -= batch < axis
        shape = [*tensor.shape[:batch], *tensor.shape[batch + 1 :]]
        shape[axis] = 0
        label = f"window_{name}.{number}" if window else f"{name}.{number}"
        kind: Kind = "window" if window else "rows"
        yield Part(label, attribute, None, kind, tensor.dtype, tensor.device, tuple(shape), batch, axis, window - 1)
    for attribute, name in _STATES.items():
        states = held.get(attribute)
        for index, tensor in states.items() if isinstance(states, dict) else ((None, states),):
            if tensor is not None:
                label = f"{name}.{number}.{index or 0}"
                yield Part(label, attribute, index, "state", tensor.dtype, tensor.device, tuple(tensor.shape[1:]))


def _check_tensor(part: Part, tensor: torch.Tensor | None, length: int, *, more: bool) -> None:
    if tensor is None:
        raise ArrayError(f"{part.name}: the cache holds nothing there; it has not seen {length} tokens")
    batch = tensor.shape[part.batch_axis] if tensor.ndim > part.batch_axis else 0
    if batch != 1:
        raise ArrayError(
            f"{part.name}: the cache holds {batch} sequences, a session is one; take it out with batch_select_indices, and "
            "without padding"
        )
    if tensor.dtype != part.dtype:
        raise ArrayError(f"{part.name}: the cache holds {tensor.dtype}, the model's own {part.dtype}")
    shape = (*tensor.shape[: part.batch_axis], *tensor.shape[part.batch_axis + 1 :])
    expected = part.shape
    if part.kind != "state":
        expected = part.extent(length if part.kind == "rows" else min(length, part.window))
    spare = part.token_axis if part.kind == "window" else len(expected) - 1
    fits = shape == expected or (
        more
        and part.kind != "rows"
        and len(shape) == len(expected)
        and all(got >= want if i == spare else got == want for i, (got, want) in enumerate(zip(shape, expected, strict=True)))
    )
    if not fits:
        raise ArrayError(f"{part.name}: the cache holds shape {shape}, expected {expected} after {length} tokens")


_PLAIN = (bool, int, float, str, type(None), torch.dtype)


def _others(
    layer: object, number: int, tensors: set[tuple[str, int | None]], error: type[LayoutError | ArrayError]
) -> Iterator[tuple[str, Any]]:
    """Yield what a layer holds beside the tensors that are taken and what is left alone; raise `error` at anything odd."""
    for name, value in vars(layer).items():
        if name in _DERIVED or name in _DEVICES or name in (_LENGTH, _RECORDS) or (name, None) in tensors:
            continue
        if name in _STATES and isinstance(value, dict):
            if any(state is not None and (name, index) not in tensors for index, state in value.items()):
                raise error(f"layer {number}: {name} holds a state that the model's own cache hasn't")
            continue
        inner = list(value.values()) if isinstance(value, dict) else [value]
        if not all(isinstance(one, _PLAIN) for one in inner):
            raise error(
                f"layer {number}, a {type(layer).__name__}: this adapter doesn't know what {name} is "
                f"({', '.join(type(one).__name__ for one in inner)}), so it can't vouch for a restored cache"
            )
        yield name, copy.copy(value)
