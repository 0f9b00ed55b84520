"""Generating on top of a store: the same answers, less to compute, and calls that can't be resumed refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from kvstore import CheckpointPolicy
from kvstore.adapters.transformers.generating import only_new
from kvstore.errors import ArrayError, EngineError

from .conftest import Open
from .models import BLOCK, CONFIGS, DTYPES, engine, model, tokens

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}


def ids(count: int, seed: int) -> torch.Tensor:
    """Make up a prompt as a tensor."""
    return torch.from_numpy(tokens(count, seed).astype(np.int64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_prompt_is_answered_alike(sessions: Open, name: str, dtype: str) -> None:
    """A prompt that is sent again reuses all but its last token and gets the same answer; so does the turn after it."""
    kept, prompt = sessions(name, dtype), ids(BLOCK * 2 + 3, 21)
    cold = kept.generate(prompt, **GREEDY)
    assert cold.reused == 0
    assert cold.sequences.shape == (1, prompt.numel() + 12)
    assert torch.equal(cold.sequences[0, : prompt.numel()], prompt)
    warm = kept.generate(prompt[None], **GREEDY)
    assert warm.reused == prompt.numel() - 1
    assert torch.equal(warm.sequences, cold.sequences)
    longer = torch.cat([cold.sequences[0], ids(7, 22)])
    turn = kept.generate(longer, **GREEDY)
    assert turn.reused == cold.sequences.numel() - 1
    running = engine(name, dtype)  # the same by hand, never interrupted
    for start, stop in ((0, prompt.numel() - 1), *((i, i + 1) for i in range(prompt.numel() - 1, cold.sequences.numel() - 1))):
        running.feed(longer[start:stop].numpy())
    running.feed(longer[cold.sequences.numel() - 1 : -1].numpy())
    chosen = [int(longer[-1])]
    for _ in range(12):
        chosen.append(int(running.feed([chosen[-1]]).argmax()))
    assert turn.sequences[0, longer.numel() :].tolist() == chosen[1:]
    assert kept.stats.faults == 0


@pytest.mark.parametrize("name", CONFIGS)
def test_answers_are_those_of_plain_generate(sessions: Open, name: str) -> None:
    """Cold and warm, with a processor that looks at the whole prompt, the tokens are those of `model.generate` without a store."""
    kept, prompt = sessions(name), ids(BLOCK + 9, 23)
    settings = {**GREEDY, "repetition_penalty": 1.7}
    plain = model(name).generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), **settings)
    cold = kept.generate(prompt, **settings)
    assert torch.equal(cold.sequences, plain)
    warm = kept.generate(prompt, **settings)
    assert warm.reused == prompt.numel() - 1
    assert torch.equal(warm.sequences, plain)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_next", "gemma3_text", "mamba2"])
def test_a_boundary_is_where_the_next_request_departs(sessions: Open, name: str) -> None:
    """With a boundary before what a template adds and takes away again, the next request reuses everything up to it."""
    kept, history = sessions(name), ids(BLOCK + 4, 24)
    kept.generate(torch.cat([history, torch.tensor([90, 91, 92])]), boundary=history.numel(), **GREEDY)
    other = torch.cat([history, ids(9, 25)])
    assert kept.generate(other, **GREEDY).reused == history.numel()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("boundary", [None, 0, 20])
def test_a_prompt_may_be_read_in_chunks(sessions: Open, name: str, boundary: int | None) -> None:
    """`prefill_chunk_size` bounds what is read at once, wherever the boundary is, and changes no token of the answer."""
    prompt = ids(BLOCK * 2 + 8, 26)
    whole = sessions(name, salt=b"whole").generate(prompt, **GREEDY)
    kept = sessions(name, salt=b"chunks")
    assert torch.equal(kept.generate(prompt, boundary=boundary, prefill_chunk_size=7, **GREEDY).sequences, whole.sequences)
    assert kept.restore(whole.sequences[0].numpy())[1] == whole.sequences.numel() - 1


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_5_text", "mamba2"])
def test_the_third_session_starts_where_the_first_two_part(sessions: Open, name: str) -> None:
    """The second prompt with a common beginning leaves states where it parts, and the third has only its own end to read."""
    kept = sessions(name, checkpoints=CheckpointPolicy(least_gain=8))
    common = ids(BLOCK + 11, 31)
    prompts = [torch.cat([common, torch.tensor([10 + n]), ids(9, 32 + n)]) for n in range(3)]
    answers = [kept.generate(prompt, **GREEDY) for prompt in prompts]
    assert [answer.reused for answer in answers] == [0, 0, common.numel()]
    running = engine(name)  # the third by hand, never interrupted, in the same pieces
    running.feed(common.numpy())
    running.feed(prompts[2][common.numel() : -1].numpy())
    chosen = [int(prompts[2][-1])]
    for _ in range(12):
        chosen.append(int(running.feed([chosen[-1]]).argmax()))
    assert answers[2].sequences[0, prompts[2].numel() :].tolist() == chosen[1:]
    assert kept.stats.faults == 0


def test_a_prompt_of_one_token(sessions: Open) -> None:
    """Nothing can be restored for it, and its answer is stored."""
    for name in ("qwen3", "mamba2"):
        kept = sessions(name)
        first = kept.generate(torch.tensor([5]), **GREEDY)
        again = kept.generate(torch.tensor([5]), **GREEDY)
        assert (first.reused, again.reused) == (0, 0)
        assert torch.equal(first.sequences, again.sequences)
        assert kept.restore(first.sequences[0].numpy())[1] == 12


def test_the_output_is_handed_on(sessions: Open) -> None:
    """Dictionaries of outputs, stop tokens, streamers and sampling work as in plain `generate`."""
    kept, prompt = sessions("qwen3_next"), ids(BLOCK, 27)
    full = kept.generate(prompt, return_dict_in_generate=True, output_logits=True, **GREEDY)
    assert len(full.output.logits) == 12
    assert torch.equal(full.output.sequences, full.sequences)
    settings = GenerationConfig(do_sample=True, max_new_tokens=5, pad_token_id=0, eos_token_id=None)
    torch.manual_seed(3)
    sampled = kept.generate(prompt, generation_config=settings)
    assert sampled.reused == prompt.numel() - 1
    torch.manual_seed(3)
    assert torch.equal(kept.generate(prompt, generation_config=settings).sequences, sampled.sequences)
    # last, since its end is a third checkpoint on the first answer's path, of which the two deepest are kept
    stop = int(full.sequences[0, prompt.numel() + 3])
    early = kept.generate(prompt, **{**GREEDY, "eos_token_id": stop})
    assert int(early.sequences[0, -1]) == stop
    assert early.sequences.numel() <= prompt.numel() + 4


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"num_beams": 2}, "beam_search"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences=2"),
        ({"prompt_lookup_num_tokens": 3}, "assisted"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"use_cache": False}, "use_cache=False"),
        ({"past_key_values": object()}, "past_key_values"),
        ({"pixel_values": torch.ones(1)}, "pixel_values"),
        ({"inputs_embeds": torch.ones(1)}, "inputs_embeds"),
        ({"attention_mask": torch.tensor([[0] + [1] * (BLOCK - 1)])}, "all ones"),
        ({"attention_mask": torch.ones(1, 3)}, "all ones"),
        ({"boundary": BLOCK}, "boundary"),
        ({"boundary": -1}, "boundary"),
    ],
    ids=str,
)
def test_calls_that_cannot_be_resumed_are_refused(sessions: Open, arguments: dict[str, Any], says: str) -> None:
    """Several sequences, cropped ones, padding, and whatever the model reads beside tokens are misuse, named, and store nothing."""
    kept = sessions("qwen3")
    with pytest.raises(EngineError, match=says):
        kept.generate(ids(BLOCK, 28), **{**GREEDY, **arguments})
    assert kept.stats.cascades == kept.stats.promotes == 0


@pytest.mark.parametrize("prompt", [torch.ones(2, 5, dtype=torch.int64), torch.ones(0, dtype=torch.int64)], ids=["two", "none"])
def test_one_sequence_at_a_time(sessions: Open, prompt: torch.Tensor) -> None:
    """A batch, and a prompt without tokens, are refused."""
    with pytest.raises(ArrayError, match="one sequence"):
        sessions("qwen3").generate(prompt, **GREEDY)


def test_what_a_generation_reads_first_is_known() -> None:
    """A first pass over anything else than what is new, or none, is refused afterwards: recurrent states would hide it."""

    reading: Any = torch.nn.Module()
    reading.forward = lambda **given: given["input_ids"].shape[-1] if "input_ids" in given else 0
    for given in ({"input_ids": torch.ones(1, 20)}, {"input_ids": torch.ones(1, 8)}):
        with only_new(reading, 20, 12):
            assert reading(**given) == 8
            assert reading(input_ids=torch.ones(1, 1)) == 1
    for given, says in (
        ({"input_ids": torch.ones(1, 9)}, "reading 9 tokens"),
        ({"inputs_embeds": torch.ones(1, 8, 4)}, "reading 0"),
    ):
        with pytest.raises(EngineError, match=says), only_new(reading, 20, 12):
            reading(**given)
    with pytest.raises(EngineError, match="went past"), only_new(reading, 20, 12):
        pass
