"""The contract of attention backends, tried on this one."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvist import CacheSpec, Layer
from kvist.testing.attention import AttentionBackendTests, Case
from kvist_gated_delta_net.attention import GatedDeltaBackend, GatedDeltaInputs
from kvist_gated_delta_net.spec import cache_spec

KEY_HEADS, HEADS, KEY_SIZE, VALUE_SIZE, WIDTH = 2, 4, 8, 6, 4
CHANNELS = 2 * KEY_HEADS * KEY_SIZE + HEADS * VALUE_SIZE


def spec(dtype: str) -> CacheSpec:
    """The linear layers of a small hybrid: what this backend serves."""
    config = {
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": HEADS,
        "linear_key_head_dim": KEY_SIZE,
        "linear_value_head_dim": VALUE_SIZE,
        "linear_conv_kernel_dim": WIDTH,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "vocab_size": 1000,
    }
    return cache_spec(config, block_tokens=8, dtype=dtype).only({"conv_state", "recurrent_state"})


class TestGatedDeltaBackend(AttentionBackendTests):
    backend = GatedDeltaBackend
    cases = (
        Case(name="float32", spec=spec("float32")),
        Case(name="bfloat16", spec=spec("bfloat16"), dtype="bfloat16"),
    )
    constants = frozenset({"weight"})

    def inputs(self, case: Case, layer: Layer, token_count: int, generator: torch.Generator) -> GatedDeltaInputs:
        dtype = getattr(torch, case.dtype)

        def draw(size: int) -> torch.Tensor:
            return torch.randn(token_count, size, generator=generator)

        weight = torch.randn(CHANNELS, WIDTH, generator=torch.Generator().manual_seed(layer.id))
        return GatedDeltaInputs(
            draw(CHANNELS).to(dtype), -F.softplus(draw(HEADS) - 1), torch.sigmoid(draw(HEADS)), weight.to(dtype)
        )

    def reference(self, case: Case, layer: Layer, inputs: GatedDeltaInputs) -> torch.Tensor:
        """One head after the other, without any state: the memory is rebuilt from all tokens so far, as the sum of
        what each of them wrote and the later ones left of it."""
        padded = F.pad(inputs.mixed.T, (WIDTH - 1, 0))
        convolved = F.silu((padded.unfold(1, WIDTH, 1) * inputs.weight[:, None]).sum(-1)).T
        size = KEY_HEADS * KEY_SIZE
        count, output = len(convolved), convolved.new_empty(len(convolved), HEADS, VALUE_SIZE)
        for head in range(HEADS):
            at = head // (HEADS // KEY_HEADS) * KEY_SIZE
            query, key = (
                each / (each.square().sum(1, keepdim=True) + 1e-6).sqrt()
                for each in (convolved[:, at : at + KEY_SIZE], convolved[:, size + at : size + at + KEY_SIZE])
            )
            value = convolved[:, 2 * size + head * VALUE_SIZE :][:, :VALUE_SIZE]
            # The values that are written solve a triangular system: each is what a token has that the memory, as it is
            # by then, does not say already.
            total = inputs.decay[:, head].cumsum(0)
            left = (total[:, None] - total[None, :]).exp().tril()
            beta = inputs.beta[:, head, None]
            system = torch.eye(count, dtype=torch.float64) + beta * (left * (key @ key.T)).tril(-1)
            written = torch.linalg.solve_triangular(system, beta * value, upper=False)
            output[:, head] = KEY_SIZE**-0.5 * (left * (query @ key.T)).tril() @ written
        return output
