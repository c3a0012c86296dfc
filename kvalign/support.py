"""Which model families kvalign converts, as data, and the judgement of one config.json against it.

Must not import torch or transformers: the API answers from here.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from kvalign.errors import SourceUnsupported


class Status(StrEnum):
    """What is known about a family."""

    SUPPORTED = "supported"  # kvalign's own tests convert models of this family
    UNTESTED = "untested"  # allowed; the geometry is measured, and a mismatch is refused then
    REFUSED = "refused"  # known not to work, with the reason


@dataclass(frozen=True)
class Family:
    """One row of the support matrix.

    model_type  as config.json spells it
    attention   how many KV heads, and what each layer keeps
    positions   how positions enter the keys
    reason      why it is refused; empty otherwise
    """

    model_type: str
    status: Status
    attention: str = ""
    positions: str = ""
    reason: str = ""


def family(model_type: str) -> Family | None:
    """The row of a model type; None for one that the matrix does not know."""
    return MATRIX.get(model_type)


def check_architecture(config: Mapping[str, Any]) -> Family:
    """The family of a config.json that may be converted.

    Judges what the config alone can tell: the family, the head, remote code, and the settings that
    change what the cache holds. Raises SourceUnsupported naming the setting.
    """
    row = _known_family(config)
    for refusal in (_not_causal, _compressed_attention, _windowed_layers, _unstable_positions, _quantized):
        if reason := refusal(config):
            raise SourceUnsupported(f"This {row.model_type} model cannot be converted: {reason}.", _OTHER_MODEL)
    return row


def support_matrix() -> dict[str, Any]:
    """The whole matrix, JSON-ready, as GET /v1/support answers it."""
    return {
        "families": [asdict(row) for row in sorted(MATRIX.values(), key=lambda row: row.model_type)],
        "unlisted": "untested: allowed when the class is a causal language model of transformers",
        "refused_settings": [
            {"setting": "is_encoder_decoder, no causal language-model head", "reason": _NOT_CAUSAL},
            {"setting": "kv_lora_rank", "reason": _LATENT},
            {"setting": "layer_types, sliding_window", "reason": _WINDOWS},
            {"setting": "rope_scaling: dynamic, longrope, su", "reason": _MOVING_KEYS},
            {"setting": "quantization_config", "reason": _QUANTIZED},
        ],
    }


_OTHER_MODEL = "Choose a model with a supported architecture; GET /v1/support lists them."

_NOT_CAUSAL = "it is not a decoder-only causal language model"
_ENCODER = "an encoder keeps no KV cache"
_SEQ2SEQ = "encoder-decoder models keep a cross-attention cache that kvalign does not convert"
_RECURRENT = "it keeps a recurrent state instead of a KV cache"
_LATENT = "multi-head latent attention already keeps a low-rank cache"
_HYBRID = "not yet: its layers are of different types, and each type needs its own treatment"
_WINDOWS = "not yet: sliding-window layers keep only part of the context, which needs per-layer types"
_WRAPPER = "multimodal models are not converted; their language model alone may be"
_OLD_CACHE = "it does not keep its context in a standard KV cache"
_MOVING_KEYS = "its rotary scaling changes its keys with the length of the call"
_QUANTIZED = "its weights are already quantized"

_HARMLESS_ROPE = {"default", "linear", "yarn", "llama3"}
_MOVING_ROPE = {"dynamic", "longrope", "su"}


def _known_family(config: Mapping[str, Any]) -> Family:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise SourceUnsupported("config.json names no model_type, so its architecture is unknown.", _OTHER_MODEL)
    shown = model_type[:80]
    row = family(model_type)
    if row is not None:
        if row.status is Status.REFUSED:
            raise SourceUnsupported(f"Models of type {shown} cannot be converted: {row.reason}.", _OTHER_MODEL)
        return row
    if config.get("auto_map"):
        raise SourceUnsupported(
            f"Models of type {shown} load only by running code from their repo (auto_map).",
            "kvalign never runs such code; choose a model whose architecture is part of transformers.",
        )
    if not any(name.endswith(_CAUSAL_ENDINGS) for name in _architectures(config)):
        raise SourceUnsupported(f"Models of type {shown} are unknown to kvalign: {_NOT_CAUSAL}.", _OTHER_MODEL)
    return Family(shown, Status.UNTESTED)


_CAUSAL_ENDINGS = ("ForCausalLM", "LMHeadModel")


def _architectures(config: Mapping[str, Any]) -> list[str]:
    names = config.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _not_causal(config: Mapping[str, Any]) -> str:
    if config.get("is_encoder_decoder") is True:
        return _SEQ2SEQ
    if any(isinstance(config.get(part), Mapping) for part in ("text_config", "vision_config", "audio_config")):
        return _WRAPPER
    names = _architectures(config)
    if names and not any(name.endswith(_CAUSAL_ENDINGS) for name in names):
        return f"{names[0][:80]} has no causal language-model head"
    return ""


def _compressed_attention(config: Mapping[str, Any]) -> str:
    return _LATENT if config.get("kv_lora_rank") else ""


def _windowed_layers(config: Mapping[str, Any]) -> str:
    types = config.get("layer_types")
    if isinstance(types, list):
        others = {str(kind)[:40] for kind in types} - {"full_attention"}
        return f"layer_types holds {', '.join(sorted(others)[:4])}; {_HYBRID}" if others else ""
    model_type = str(config.get("model_type"))
    window = config.get("sliding_window", _WINDOW_WHEN_UNSAID.get(model_type))
    used = config.get("use_sliding_window", model_type not in _WINDOW_OFF_WHEN_UNSAID) is not False
    longest = config.get("max_position_embeddings")
    never_reached = isinstance(longest, int) and isinstance(window, int) and window >= longest
    if used and isinstance(window, int) and not never_reached:
        return f"sliding_window is {window}; {_WINDOWS}"
    return ""


# What transformers assumes when config.json does not say.
_WINDOW_WHEN_UNSAID = {"mistral": 4096}
_WINDOW_OFF_WHEN_UNSAID = {"qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"}


def _unstable_positions(config: Mapping[str, Any]) -> str:
    for kind in _rope_types(config):
        if kind in _MOVING_ROPE:
            return f"rope scaling is {kind}; {_MOVING_KEYS}"
        if kind not in _HARMLESS_ROPE:
            return f"rope scaling {kind[:40]!r} is unknown to kvalign"
    return ""


def _rope_types(config: Mapping[str, Any]) -> list[str]:
    """Every rope type named: rope_scaling (old) or rope_parameters (new, maybe one section a layer type)."""
    kinds: list[str] = []
    for key in ("rope_scaling", "rope_parameters"):
        section = config.get(key)
        if not isinstance(section, Mapping):
            continue
        for part in (section, *section.values()):
            if isinstance(part, Mapping):
                kind = part.get("rope_type", part.get("type"))
                kinds.extend([str(kind)] if kind is not None else [])
    return kinds


def _quantized(config: Mapping[str, Any]) -> str:
    section = config.get("quantization_config")
    if not section:
        return ""
    method = section.get("quant_method") if isinstance(section, Mapping) else None
    return f"{_QUANTIZED} ({str(method)[:40] if method else 'quantization_config is set'})"


_MHA = "full, one KV head a query head"
_GQA = "full, grouped query heads"
_MQA = "full, one KV head for all query heads"
_MOE = "full, grouped query heads, mixture of experts"
_ROPE = "rotary"
_PARTIAL = "rotary on part of the channels"
_LEARNED = "learned, added to the embeddings"
_ALIBI = "ALiBi, none in the keys"


def _rows() -> list[Family]:
    supported = [
        ("gpt2", _MHA, _LEARNED),
        ("llama", _GQA, _ROPE),
        ("qwen2", _GQA, _ROPE),
    ]
    untested = [
        ("apertus", _GQA, _ROPE),
        ("arcee", _GQA, _ROPE),
        ("biogpt", _MHA, _LEARNED),
        ("bitnet", _GQA, _ROPE),
        ("bloom", _MHA, _ALIBI),
        ("codegen", _MHA, _PARTIAL),
        ("cohere", _GQA, "rotary, interleaved"),
        ("dbrx", _MOE, _ROPE),
        ("ernie4_5", _GQA, "rotary, interleaved"),
        ("ernie4_5_moe", _MOE, "rotary, interleaved"),
        ("exaone", _GQA, _ROPE),
        ("falcon", _MQA, "rotary, or ALiBi when config.json says so"),
        ("gemma", _GQA, _ROPE),
        ("glm", _GQA, _PARTIAL),
        ("glm4", _GQA, _PARTIAL),
        ("glm4_moe", _MOE, _PARTIAL),
        ("gpt_bigcode", _MQA, _LEARNED),
        ("gpt_neo", "full cache; every second layer attends to a window of it", _LEARNED),
        ("gpt_neox", _MHA, _PARTIAL),
        ("gpt_neox_japanese", _MHA, _PARTIAL),
        ("gptj", _MHA, "rotary on part of the channels, interleaved"),
        ("granite", _GQA, _ROPE),
        ("granitemoe", _MOE, _ROPE),
        ("granitemoeshared", _MOE, _ROPE),
        ("helium", _GQA, "rotary, interleaved"),
        ("hunyuan_v1_dense", _GQA, "rotary, keys normalized after it"),
        ("internlm3", _GQA, _ROPE),
        ("jais2", _GQA, _ROPE),
        ("mistral", _GQA, _ROPE),
        ("mixtral", _MOE, _ROPE),
        ("mpt", _MHA, _ALIBI),
        ("nanochat", _GQA, "rotary, keys normalized after it"),
        ("nemotron", _GQA, _PARTIAL),
        ("olmo", _GQA, _ROPE),
        ("olmo2", _GQA, "keys normalized, then rotary"),
        ("olmoe", _MOE, "keys normalized, then rotary"),
        ("opt", _MHA, _LEARNED),
        ("persimmon", _MHA, _PARTIAL),
        ("phi", _GQA, _PARTIAL),
        ("phi3", _GQA, _ROPE),
        ("phimoe", _MOE, _ROPE),
        ("qwen2_moe", _MOE, _ROPE),
        ("qwen3", _GQA, "keys normalized, then rotary"),
        ("qwen3_moe", _MOE, "keys normalized, then rotary"),
        ("seed_oss", _GQA, _ROPE),
        ("smollm3", _GQA, "rotary, on three layers of four"),
        ("stablelm", _GQA, _PARTIAL),
        ("starcoder2", _GQA, _ROPE),
        ("xglm", _MHA, "sinusoidal, added to the embeddings"),
    ]
    refused = [
        (
            _ENCODER,
            "albert bert bert-generation big_bird camembert convbert data2vec-text deberta deberta-v2",
        ),
        (_ENCODER, "distilbert electra ernie eurobert flaubert funnel ibert longformer luke megatron-bert"),
        (_ENCODER, "mobilebert modernbert mpnet mra nomic_bert nystromformer rembert roberta"),
        (
            _ENCODER,
            "roberta-prelayernorm roc_bert roformer squeezebert xlm xlm-roberta xlm-roberta-xl xmod yoso",
        ),
        (
            _SEQ2SEQ,
            "bart bigbird_pegasus blenderbot blenderbot-small encoder-decoder fsmt led longt5 m2m_100",
        ),
        (_SEQ2SEQ, "marian mbart mt5 mvp nllb-moe pegasus pegasus_x plbart prophetnet seamless_m4t"),
        (_SEQ2SEQ, "seamless_m4t_v2 speech_to_text switch_transformers t5 t5gemma trocr udop umt5 whisper"),
        (_RECURRENT, "falcon_mamba mamba mamba2 rwkv xlstm"),
        (_LATENT, "deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 glm4_moe_lite glm_moe_dsa longcat_flash"),
        (_LATENT, "minicpm3 sarvam_mla youtu"),
        (_HYBRID, "bailing_hybrid bamba falcon_h1 granitemoehybrid jamba kimi_linear lfm2 lfm2_moe minimax"),
        (
            _HYBRID,
            "nemotron_h olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma zamba zamba2",
        ),
        (
            _WINDOWS,
            "cohere2 exaone4 exaone_moe gemma2 gemma3_text gemma3n_text gemma4_text gpt_oss granite_swa",
        ),
        (_WINDOWS, "granitemoe_swa llama4_text ministral mimo_v2_flash modernbert-decoder olmo3 vaultgemma"),
        (
            _WRAPPER,
            "aria aya_vision chameleon cohere2_vision emu3 fuyu gemma3 gemma3n gemma4 git glm4v got_ocr2",
        ),
        (
            _WRAPPER,
            "idefics idefics2 idefics3 internvl kosmos-2 llama4 llava llava_next mistral3 mllama moshi",
        ),
        (_WRAPPER, "musicgen paligemma phi4_multimodal pixtral qwen2_5_omni qwen2_5_vl qwen2_audio qwen2_vl"),
        (_WRAPPER, "qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe smolvlm vipllava voxtral"),
        (_OLD_CACHE, "openai-gpt reformer xlnet"),
    ]
    return [
        *(Family(name, Status.SUPPORTED, attention, positions) for name, attention, positions in supported),
        *(Family(name, Status.UNTESTED, attention, positions) for name, attention, positions in untested),
        *(Family(name, Status.REFUSED, reason=reason) for reason, names in refused for name in names.split()),
    ]


MATRIX: Mapping[str, Family] = {row.model_type: row for row in _rows()}
