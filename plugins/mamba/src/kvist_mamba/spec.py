"""From the config of a recurrent or hybrid model to a cache spec. Imports neither torch nor transformers.

The input is the config as a mapping: ``config.json`` as it lies on disk, or ``config.to_dict()``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvist.errors import SpecError
from kvist.spec import CacheSpec, Heads, History, Layer, RowFormat, Sections, State, Stream
from kvist_mamba.config import Config, check_activation, check_rotation, digest, element_type, positive
from kvist_mamba.families import FAMILIES, FULL, HYBRID, NOTHING, RECURRENT, Family, Mixer
from kvist_mamba.inputs import CHECKPOINT, CONV_HISTORY, CONV_STATE, GATE_HISTORY, RECURRENT_STATE
from kvist_mamba.retention import Replay

#: What Zamba2 means by ``use_long_context``, whatever ``max_position_embeddings`` says.
_LONG_CONTEXT = 16384
#: Ways to take drafts back.
ROLLBACKS = ("snapshots", "replay")
#: Element types that a recurrent state can be stored in. float64 is for measuring the others.
STATE_DTYPES = ("float32", "bfloat16", "float64")


def cache_spec(
    config: Mapping[str, Any],
    *,
    block_tokens: int = 16,
    dtype: str | None = None,
    fingerprint: str | None = None,
    state_dtype: str | None = None,
    rollback: str = "snapshots",
    history_tokens: int = 16,
) -> CacheSpec:
    """What a recurrent or hybrid model keeps.

    A recurrent layer has streams ``"conv_state"``, the last ``K - 1`` raw inputs of its convolution as ``[channels,
    K - 1]``, and, unless it is a convolution only, ``"recurrent_state"``: ``[E, N]`` for Mamba, ``[H, P, N]`` for
    Mamba-2, ``[value heads, key size, value size]`` for gated delta nets. An attention layer has ``"k"`` and ``"v"``;
    a layer can have all four. All states of a sequence lie in one page.

    config: Hugging Face config mapping with a served ``model_type``.
    dtype: element type of keys, values and convolution states, torch's name without the prefix; ``None`` takes the
        config's, else float32.
    fingerprint: what tells this model's rows from another's; ``None`` digests config and dtypes, which is enough
        where only one set of weights is in play.
    state_dtype: element type of recurrent states, one of :data:`STATE_DTYPES`; ``None`` takes the config's
        ``mamba_ssm_cache_dtype``, else float32.
    rollback: how drafts are taken back. ``"snapshots"`` stores the state after each query token, in a page each;
        ``"replay"`` stores the inputs of the last tokens in the state's own page, see
        :class:`~kvist_mamba.retention.Replay`.
    history_tokens: for ``"replay"``, how many, which is also the most drafts of a step.

    Raises SpecError naming the config field that is missing or cannot work.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise _unknown(config, model_type)
    family = FAMILIES[model_type]
    dtype = dtype or element_type(config)
    given, config = config, {**family.defaults, **config}
    state_dtype = state_dtype or config.get("mamba_ssm_cache_dtype") or "float32"
    if state_dtype not in STATE_DTYPES:
        raise SpecError(
            f"{model_type}: recurrent states in {state_dtype!r} are not served",
            hint=f"state_dtype is one of {', '.join(STATE_DTYPES)}",
        )
    if family.activation is not None:
        check_activation(config, family.activation)
    if rollback not in ROLLBACKS:
        raise SpecError(f"rollback={rollback!r} is not served", hint=f"it is one of {', '.join(ROLLBACKS)}")
    replays = rollback == "replay"
    types = family.layer_types(config)
    _check_types(model_type, types)
    streams: dict[str, tuple[Stream, ...]] = {NOTHING: ()}
    if RECURRENT in types or HYBRID in types:
        retention = Replay(history_tokens) if replays else State()
        streams[RECURRENT] = _states(family.mixer(config), model_type, dtype, state_dtype, retention)
    if FULL in types or HYBRID in types:
        check_rotation(config)
        streams[FULL] = _keys_and_values(config, family, dtype)
    if HYBRID in types:
        streams[HYBRID] = streams[RECURRENT] + streams[FULL]
    layers = tuple(Layer(index, streams[kind]) for index, kind in enumerate(types) if streams[kind])
    return CacheSpec(
        layers,
        block_tokens,
        fingerprint or digest(given, dtype, state_dtype, *((rollback, str(history_tokens)) if replays else ())),
        max_tokens=_max_tokens(config) if FULL in streams else None,
        vocab_size=positive(config, "vocab_size"),
    )


def _max_tokens(config: Config) -> int:
    return _LONG_CONTEXT if config.get("use_long_context") else positive(config, "max_position_embeddings")


def _states(mixer: Mixer, model_type: str, dtype: str, state_dtype: str, retention: State) -> tuple[Stream, ...]:
    if mixer.kernel < 2:
        raise SpecError(f"{model_type}: a convolution of width {mixer.kernel} keeps nothing", hint="it must be wider")
    channels, sections = sum(mixer.sections), Sections(mixer.sections)
    streams = [Stream(CONV_STATE, RowFormat((channels, mixer.kernel - 1), dtype), retention, sharding=sections)]
    if mixer.state is not None:
        count = mixer.state[0]
        sharding = Heads(count) if mixer.heads else Sections((count,))
        streams.append(Stream(RECURRENT_STATE, RowFormat(mixer.state, state_dtype), retention, sharding=sharding))
    if isinstance(retention, Replay):
        row = RowFormat((channels, retention.tokens), dtype)
        streams.append(Stream(CONV_HISTORY, row, retention, sharding=sections))
        if mixer.state is not None and mixer.gates:
            heads = mixer.state[0]
            row = RowFormat((mixer.gates * heads, retention.tokens), "float64" if dtype == "float64" else "float32")
            streams.append(Stream(GATE_HISTORY, row, retention, sharding=Sections((heads,) * mixer.gates)))
        streams.append(Stream(CHECKPOINT, RowFormat((1,), "int64"), retention))
    return tuple(streams)


def _keys_and_values(config: Config, family: Family, dtype: str) -> tuple[Stream, ...]:
    heads = kv_heads = positive(config, "num_attention_heads")
    if config.get("num_key_value_heads") is not None:
        kv_heads = positive(config, "num_key_value_heads")
    if heads % kv_heads:
        raise SpecError(
            f"{config['model_type']}: num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}",
            hint="every key head serves the same number of query heads",
        )
    row = RowFormat((kv_heads, family.head_size(config)), dtype)
    return tuple(Stream(name, row, History(), sharding=Heads(kv_heads)) for name in ("k", "v"))


def _check_types(model_type: str, types: list[str]) -> None:
    served = (RECURRENT, FULL, HYBRID, NOTHING)
    for index, kind in enumerate(types):
        if kind not in served:
            raise SpecError(
                f"{model_type}: layer {index} is of type {kind!r}, which is not served",
                hint=f"served are {RECURRENT!r}, {FULL!r}, {HYBRID!r}, 'mlp' and 'moe'",
            )


def _unknown(config: Config, model_type: object) -> SpecError:
    hint = f"served are {', '.join(sorted(FAMILIES))}"
    if isinstance(config.get("text_config"), Mapping):
        hint = "this is a multimodal config; its text model is under 'text_config'"
    if model_type is None:
        return SpecError("the config has no model_type", hint=hint)
    return SpecError(f"model_type {model_type!r} is not served", hint=hint)
