"""The README's example runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support import ROOT

from .models import BLOCK, model, tokens


def test_the_example_runs(path: Path) -> None:
    """The README's piece of code works on a model and a prompt: its second turn reuses what its first one has stored."""
    text = (ROOT / "README.md").read_text()
    blocks = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "TransformersSessions" in block]
    assert len(blocks) == 1
    assert "/var/cache/kv" in blocks[0]
    code = blocks[0].replace("/var/cache/kv", str(path)).replace("100 << 30", "64 << 20") + "\nstore.close()"
    prompt, turn = (torch.from_numpy(tokens(count, 31).astype(np.int64))[None] for count in (BLOCK + 5, 7))
    names: dict[str, Any] = {"model": model("qwen3_next"), "input_ids": prompt, "next_turn": turn}
    exec(code.replace("max_new_tokens=200", "max_new_tokens=20"), names)
    assert names["answer"].reused == 0
    assert names["reused"] == names["answer"].sequences.shape[1] - 1
    assert names["cache"].get_seq_length() == names["answer"].sequences.shape[1] + 7
