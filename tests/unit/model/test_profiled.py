"""Facts that the code recorded against the names of the kernels that a GPU ran."""

import random
from typing import Any

import pytest

from ablate.kernels import facts
from ablate.model.facts import ModelFact
from ablate.model.training.profiled import ATTENTION_KERNELS, attest

NAMES = {
    "flash": ("void pytorch_flash::flash_fwd_kernel<Flash_fwd", "void pytorch_flash::flash_bwd_dot_do_o_kernel<true"),
    "fa4": (
        "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__tensor000",
        "kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90_object_at__tensor000",
    ),
    "efficient": ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "fmha_cutlassB_bf16_aligned_64x64_k64_dropout_sm80"),
    "flex": ("triton_tem_fused_flex_attention_0", "triton_tem_fused_flex_attention_backward_1"),
}
"""Names as the profiler reported them on an H100."""
OTHERS = ("nvjet_sm90_tst_192x192_64x4_1x2_h_bz_coopB_TNN", "b3_gradients_kernel", "triton_poi_fused_add_0")


def corrected(observed: dict[str, Any], *names: str, projections: int = 0) -> dict[str, Any]:
    seen = facts.Facts()
    seen.update(observed)
    attest(dict.fromkeys(names, 1), seen, projections=projections)
    return dict(seen)


@pytest.mark.parametrize("backend", NAMES)
def test_an_implementation_is_live_if_its_kernels_ran_in_both_passes_and_no_other_did(backend: str) -> None:
    recorded = {ModelFact.ATTENTION: "sdpa" if backend == "efficient" else backend}
    assert corrected(recorded, *OTHERS, *NAMES[backend]) == recorded | {ModelFact.ATTENTION_KERNELS: backend}
    if backend == "efficient":
        return
    for kept, direction in zip(NAMES[backend], ("backward", "forward"), strict=True):
        assert f"no {direction} kernel of it ran" in corrected(recorded, *OTHERS, kept)[ModelFact.ATTENTION]


def test_every_pair_of_implementations_that_answer_for_each_other_is_found() -> None:
    for recorded in ("sdpa", "flash", "fa4", "flex"):
        allowed = {"flash", "cudnn", "efficient"} if recorded == "sdpa" else {recorded}
        for ran in NAMES:
            fact = corrected({ModelFact.ATTENTION: recorded}, *OTHERS, *NAMES[ran])[ModelFact.ATTENTION]
            assert (fact == recorded) == (ran in allowed), (recorded, ran, fact)


def test_sdpa_says_which_kernel_torch_chose_or_that_none_is_of_a_known_name() -> None:
    chosen = corrected({ModelFact.ATTENTION: "sdpa"}, *NAMES["flash"])
    assert chosen[ModelFact.ATTENTION_KERNELS] == "flash"
    own = corrected({ModelFact.ATTENTION: "sdpa"}, *OTHERS)
    assert own == {ModelFact.ATTENTION: "sdpa", ModelFact.ATTENTION_KERNELS: "none of a known name"}


@pytest.mark.parametrize(
    ("fact", "value", "name"),
    [
        (ModelFact.LOSS, "quack", "kernel_cutlass_kernel_quackcross_entropyCrossEntropy_object_at__tensorptrbf16"),
        (ModelFact.LOSS, "liger", "liger_cross_entropy_kernel"),
        (
            ModelFact.ADAMW_UPDATE,
            "fused",
            "multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMath",
        ),
    ],
)
def test_a_loss_or_update_without_its_kernel_is_not_live(fact: ModelFact, value: str, name: str) -> None:
    assert corrected({fact: value}, *OTHERS, name) == {fact: value}
    assert "no kernel of it ran" in corrected({fact: value}, *OTHERS)[fact]


def test_float8_products_are_counted_once_or_twice_for_each_projection() -> None:
    drawn = random.Random(20261126)  # noqa: S311 - a reproducible draw
    for _ in range(200):
        projections, ran = drawn.randint(1, 60), drawn.randint(0, 130)
        kind = drawn.choice(("as_dtype", "fp8_forward", "fp8"))
        ran = drawn.choice((ran, 0, projections, 2 * projections))
        seen = facts.Facts()
        seen[ModelFact.PROJECTIONS] = kind
        names = ("nvjet_sm90_qqtst_128x128_128x6_1x2_h_bz_ovscale_TNT", "nvjet_sm90_qrtst_128x128_128x6_1x2_h_bz_TNT")
        kernels = dict.fromkeys(OTHERS, 3) | {names[0]: ran // 2, names[1]: ran - ran // 2}
        attest({name: count for name, count in kernels.items() if count}, seen, projections=projections)
        live = ran == {"as_dtype": 0, "fp8_forward": projections, "fp8": 2 * projections}[kind]
        assert (seen[ModelFact.PROJECTIONS] == kind) == live


def test_without_kernels_the_facts_stay() -> None:
    recorded = {ModelFact.ATTENTION: "fa4", ModelFact.LOSS: "liger"}
    assert corrected(recorded) == recorded


def test_every_implementation_of_attention_on_a_gpu_has_names() -> None:
    assert set(ATTENTION_KERNELS) >= {"flash", "fa4", "cudnn", "flex"}
