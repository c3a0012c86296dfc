"""The support matrix and its judgement of config.json."""

import json
import subprocess
import sys
from typing import Any

import pytest

from kvalign.errors import SourceUnsupported
from kvalign.support import MATRIX, Status, check_architecture, support_matrix

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 2048}


def test_supported_families_are_those_that_the_tests_convert() -> None:
    supported = {name for name, row in MATRIX.items() if row.status is Status.SUPPORTED}
    assert supported == {"llama", "qwen2", "gpt2"}


def test_every_refusal_has_a_reason_and_every_other_row_a_description() -> None:
    for row in MATRIX.values():
        assert bool(row.reason) == (row.status is Status.REFUSED), row
        assert bool(row.attention and row.positions) == (row.status is not Status.REFUSED), row


def test_matrix_is_json_and_sorted() -> None:
    families = json.loads(json.dumps(support_matrix()))["families"]
    names = [row["model_type"] for row in families]
    assert names == sorted(MATRIX)
    assert {"model_type": "t5", "status": "refused"}.items() <= families[names.index("t5")].items()


def test_families_that_are_let_through_are_causal_in_transformers() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    assert {name for name, row in MATRIX.items() if row.status is not Status.REFUSED} <= CAUSAL.keys()


def test_judging_loads_no_torch() -> None:
    code = "import sys, kvalign.support, kvalign.source; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        {"model_type": "gpt2"},
        {
            "model_type": "qwen2",
            "use_sliding_window": False,
            "sliding_window": 512,
            "max_position_embeddings": 4096,
        },
        {"model_type": "qwen2", "sliding_window": 512, "max_position_embeddings": 4096},
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "phi3", "sliding_window": 262_144, "max_position_embeddings": 131_072},
        {"model_type": "phi3", "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}},
        LLAMA | {"rope_scaling": None},
        LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        LLAMA | {"layer_types": ["full_attention", "full_attention"]},
        {"model_type": "brand_new", "architectures": ["BrandNewForCausalLM"]},
    ],
)
def test_accepts(config: dict[str, Any]) -> None:
    assert check_architecture(config).status is not Status.REFUSED


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, "model_type"),
        ({"model_type": 7}, "model_type"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "encoder"),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "cross-attention"),
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "recurrent state"),
        ({"model_type": "rwkv"}, "recurrent state"),
        ({"model_type": "deepseek_v3"}, "latent attention"),
        ({"model_type": "gemma2"}, "not yet: sliding-window"),
        ({"model_type": "gpt_oss"}, "not yet"),
        ({"model_type": "qwen3_next"}, "not yet"),
        ({"model_type": "llava"}, "multimodal"),
        ({"model_type": "brand_new", "architectures": ["BrandNewForMaskedLM"]}, "unknown to kvalign"),
        ({"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "m.M"}}, "auto_map"),
        (LLAMA | {"architectures": ["LlamaForSequenceClassification"]}, "no causal language-model head"),
        (LLAMA | {"is_encoder_decoder": True}, "cross-attention"),
        (LLAMA | {"vision_config": {}}, "multimodal"),
        (LLAMA | {"kv_lora_rank": 512}, "latent attention"),
        (LLAMA | {"sliding_window": 512}, "sliding_window is 512"),
        (LLAMA | {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"model_type": "mistral"}, "sliding_window is 4096"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 512}, "sliding_window is 512"),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "changes its keys with the length"),
        (LLAMA | {"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        (LLAMA | {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, "dynamic"),
        (LLAMA | {"rope_scaling": {"rope_type": "spiral"}}, "'spiral' is unknown"),
        (LLAMA | {"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ],
)
def test_refuses_and_says_why(config: dict[str, Any], named: str) -> None:
    with pytest.raises(SourceUnsupported, match=named) as caught:
        check_architecture(config)
    assert caught.value.remedy
