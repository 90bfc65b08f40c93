"""What the model is called with in one step."""

from __future__ import annotations

import numpy as np
import torch

from kvist.scheduling import Turn
from kvist_transformers.job import EngineJob
from kvist_transformers.slots import Slots, SlotTable


def model_inputs(
    turn: Turn[EngineJob], decode_slots: Slots, slots: SlotTable, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids and positions, int64 ``[T]``, in the step's row order, and the tokens that need logits, int64: decode
    rows, then of the chunks that end in this step the last token, and those of drafts. All are on ``device``.

    decode_slots: slots of the rows that decode without drafts.
    """
    end = turn.decode_rows
    parts = [slots.last[decode_slots]]
    logit_rows = list(range(end))
    for chunk in turn.chunks:
        if len(chunk.drafts):
            parts += [slots.last[chunk.job.slot : chunk.job.slot + 1], chunk.drafts.astype(np.int64)]
        else:
            parts.append(chunk.job.tokens[chunk.start : chunk.start + chunk.count].astype(np.int64))
        end += chunk.count + len(chunk.drafts)
        if chunk.last:
            logit_rows += range(end - 1 - len(chunk.drafts), end)
    token_ids = torch.from_numpy(np.concatenate(parts)).to(device)
    positions = torch.from_numpy(turn.step.positions).to(device)
    return token_ids, positions, torch.tensor(logit_rows, dtype=torch.int64, device=device)
