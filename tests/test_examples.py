"""The examples are plugins as others write them: they keep the packaging clauses, and the how-to shows their code.

They are not installed here, so their metadata is written as an installer would.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvist.testing.packaging import Config, PluginTests
from kvist.testing.suites import run

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"

CONFIGS: dict[str, Config] = {
    "gpt_oss_sinks": {
        "model_type": "gpt_oss",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 128,
        "vocab_size": 1000,
    },
    "gated_delta_net": {
        "model_type": "qwen3_next",
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "vocab_size": 1000,
    },
}


def test_every_example_is_here() -> None:
    assert {path.parent.name for path in EXAMPLES.glob("*/pyproject.toml")} == set(CONFIGS)


def test_the_how_to_shows_their_code() -> None:
    text = (ROOT / "docs" / "how-to" / "write-an-attention-backend.md").read_text()
    blocks = re.findall(r"```python\n# (\S+)\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == text.count("```python") == 3
    for path, code in blocks:
        assert code in (ROOT / path).read_text(), f"{path} has changed"


@pytest.mark.slow
@pytest.mark.parametrize("example", sorted(CONFIGS))
def test_an_example_keeps_the_packaging_clauses(example: str, tmp_path: Path) -> None:
    project = tomllib.loads((EXAMPLES / example / "pyproject.toml").read_text())["project"]
    info = tmp_path / f"kvist_{example}-{project['version']}.dist-info"
    info.mkdir()
    required = "".join(f"Requires-Dist: {each}\n" for each in project["dependencies"])
    head = f"Metadata-Version: 2.4\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(head + required)
    (points,) = project["entry-points"]["kvist"].items()
    (info / "entry_points.txt").write_text("[kvist]\n{} = {}\n".format(*points))

    class Suite(PluginTests):
        name = example
        folders: Sequence[Path] = (tmp_path, EXAMPLES / example / "src")

        def configs(self) -> Sequence[Config]:
            return [CONFIGS[example]]

    assert run(Suite) == []
