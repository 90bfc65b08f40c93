"""Linear layers on packed weights: every number of rows, against float64; and a model that uses them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvist.native import KernelUnavailableError
from kvist_transformers import Engine, Request, packing
from kvist_transformers.packing import PackedLinears


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def kernel() -> None:
    try:
        packing._load_kernel()
    except KernelUnavailableError as error:
        pytest.skip(f"no kernel: {error}")


def tiny(dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=160, hidden_size=64, intermediate_size=112, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, attention_bias=True)  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


@pytest.mark.usefixtures("kernel", "threads")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 8), (48, 24), (64, 576), (176, 40)])
def test_every_number_of_rows(outputs: int, inputs: int, bias: bool) -> None:
    torch.manual_seed(outputs)
    linear = torch.nn.Linear(inputs, outputs, bias=bias).to(torch.bfloat16).eval()
    packed = PackedLinears(linear)
    assert packed.count == 1
    for count in [*range(31), 100]:
        # A slice of wider rows, as projections of a fused tensor are.
        rows = torch.randn(1, count, inputs + 8).to(torch.bfloat16)[..., 4 : inputs + 4]
        results = []
        for number in (1, 3):
            torch.set_num_threads(number)
            with torch.inference_mode():
                results.append(linear(rows))
        assert torch.equal(results[0], results[1])
        exact = rows.double() @ linear.weight.double().T + (linear.bias.double() if bias else 0.0)
        # Half a unit in the last place of bfloat16, and what float32 sums lose.
        torch.testing.assert_close(results[0].double(), exact, rtol=2**-8, atol=1e-5)


@pytest.mark.usefixtures("kernel")
def test_what_training_or_another_dtype_gets_is_torchs() -> None:
    linear = torch.nn.Linear(16, 16).to(torch.bfloat16)
    packed = PackedLinears(linear)
    rows = torch.randn(3, 16, dtype=torch.bfloat16, requires_grad=True)
    linear(rows).sum().backward()
    assert rows.grad is not None
    packed.detach()
    packed.detach()
    assert "forward" not in linear.__dict__


@pytest.mark.usefixtures("kernel")
def test_layers_that_do_not_fit_stay_as_they_are() -> None:
    class Other(torch.nn.Linear):
        pass

    layers = [torch.nn.Linear(16, 24), torch.nn.Linear(12, 16), Other(16, 16), torch.nn.Linear(16, 16)]
    assert PackedLinears(torch.nn.ModuleList(layers).to(torch.bfloat16)).count == 1
    assert ["forward" in layer.__dict__ for layer in layers] == [False, False, False, True]


@pytest.mark.usefixtures("kernel")
def test_an_engine_chooses_tokens_that_the_model_likes_best() -> None:
    model = tiny(torch.bfloat16)
    prompts = [torch.randint(0, 160, (length,)).tolist() for length in (5, 40, 17)]
    with Engine(model, memory="4MiB", pack_weights=True) as engine:
        assert engine._packed is not None and engine._packed.count == 2 * 7 + 1
        completions = engine.generate([Request(prompt, max_new_tokens=12) for prompt in prompts])
    assert not any("forward" in module.__dict__ for module in model.modules())
    exact = tiny(torch.bfloat16).double()
    for prompt, completion in zip(prompts, completions, strict=True):
        tokens = completion.tokens.tolist()
        with torch.inference_mode():
            logits = exact(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        chosen = logits[torch.arange(len(tokens)), torch.tensor(tokens)]
        # Logits differ by about 1; bfloat16 is wrong by less than 0.02.
        assert (logits.max(dim=1).values - chosen).max() < 0.02


def test_nothing_is_packed_in_float32_and_that_is_said() -> None:
    model = tiny(torch.float32)
    request = Request([1, 2, 3], max_new_tokens=5)
    with Engine(model, memory="4MiB") as engine:
        [expected] = engine.generate([request])
    with (
        pytest.warns(UserWarning, match="no weights were packed") as warned,
        Engine(model, memory="4MiB", pack_weights=True) as engine,
    ):
        [completion] = engine.generate([request])
    assert [str(each.message) for each in warned] == [
        "no weights were packed: the model has no linear layers in bfloat16 on a CPU"
    ]
    assert completion.tokens.tolist() == expected.tokens.tolist()


def test_without_a_compiler_torch_computes_and_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    packing._load_kernel.cache_clear()
    linear = torch.nn.Linear(16, 16).to(torch.bfloat16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert PackedLinears(linear).count == 0
    packing._load_kernel.cache_clear()
    assert [str(each.message) for each in caught] == [
        "no weights were packed, which is slower: CC=no-such-compiler is not a program"
    ]
    assert "forward" not in linear.__dict__
