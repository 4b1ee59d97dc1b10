"""Every model type of transformers, tiny, with attn_implementation "saccade" against "eager": the same results, or a refusal."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import saccade
from saccade.integrations import transformers as integration
from saccade.integrations.refusal import why_not

# why -> types that the rules of tiny_models do not bring down to a model that runs. A type that is new in transformers is in no
# list: it runs, is refused, or fails here
NOT_RUN = {
    "a package of its own is missing (timm, torchaudio, ..)": (
        "conditional_detr deformable_detr detr edgetam edgetam_vision_model fast_vlm gemma3n gemma3n_vision "
        "higgs_audio_v2_tokenizer pe_audio_video pe_audio_video_encoder pe_video pe_video_encoder perception_lm timm_backbone "
        "timm_wrapper "
    ),
    "larger than MOST_PARAMETERS where cut down by the names of numbers": (
        "bit blt chmv2 convnext convnextv2 deimv2 depth_pro dinov3_convnext edgetam_video efficientnet encodec florence2 "
        "hgnet_v2 hunyuan_vl hunyuan_vl_vision janus mimi_encoder neucodec poolformer pp_doclayout_v2 pp_doclayout_v3 "
        "pp_doclayout_v4 pp_ocrv5_server_rec qwen2_5_omni radio regnet resnet rt_detr rt_detr_resnet rt_detr_v2 sam2 "
        "sam2_hiera_det_model sam2_video sam2_vision_model seamless_m4t seamless_m4t_v2 textnet univnet vibevoice "
        "vibevoice_acoustic_tokenizer vibevoice_acoustic_tokenizer_decoder vibevoice_acoustic_tokenizer_encoder vibevoice_asr "
        "xcodec2 "
    ),
    "numbers of its configuration depend on one another": (
        "chameleon cohere_compass cohere_compass_text csm d_fine dbrx diffusion_gemma dots1 dots3_note dots3_note_text "
        "efficientloftr emu3 ernie4_5_vl_moe fun_asr_nano gemma3n_text gemma4_assistant gemma4_unified_assistant "
        "granite4_vision lfm2_moe lw_detr lw_detr_vit mamba2 mimi mimi_decoder molmo2 moonshine_streaming muse_spark "
        "muse_spark_audio musicgen musicgen_melody nemotron_h_omni neomme pocket_tts_audio_tokenizer "
        "pocket_tts_audio_tokenizer_decoder pp_ocrv5_server_det pp_ocrv6_medium_det qwen3_omni_moe qwen4_exp qwen4_exp_text "
        "sam sam_hq t5gemma2_encoder unlimited_ocr upernet videoprism videoprism_vision_model vitmatte zamba "
    ),
    "needs inputs of its own kind": (
        "audio-spectrogram-transformer audioflamingo3_encoder blip-2 blip_2_qformer cohere_compass_vision cosmos3_edge_vision "
        "dac decision_transformer deepseek_ocr2 depth_anything eomt eomt_dinov3 exaone4_5_vision fun_asr_nano_encoder gemma3n_audio "
        "gemma4_vision glm4v_moe_vision glm4v_vision glm5_next_vision glm_image_vision glm_image_vqmodel glm_ocr_vision "
        "granite_speech5_ctc granite_speech5_encoder hunyuan_vl_text idefics inkling2_vision instructblip instructblipvideo "
        "jev kimi_k25_vision kimi_linear kosmos-2 kyutai_speech_to_text lfm3_vl_vision lightglue longcat_flash "
        "minicpm_ocr_vision minicpmv4_7_vision mistral4 moonshine muse_glimmer_assistant muse_glimmer_vision "
        "muse_spark_vision nemo_speechlm nemotron3_5_transcribe_asr_audio nemotron3_5_transcribe_audio "
        "nemotron3_5_transcribe_word_timestamp nemotron3_diarization nemotron3_diarization_audio nemotron_h patchtst pe_audio "
        "pe_audio_encoder pi0 pix2struct pocket_tts_audio_tokenizer_encoder pp_ocrv5_mobile_det pp_ocrv5_mobile_rec "
        "pp_ocrv6_small_det pp_ocrv6_small_rec pp_ocrv6_tiny_rec prompt_depth_anything qwen2_5_vl_vision qwen3_5_moe_vision "
        "qwen3_5_vision qwen3_asr_encoder qwen3_vl_moe_vision qwen3_vl_vision qwen4_exp_vision rf_detr sam3_tracker "
        "sam3_tracker_video sam3_video shieldgemma2 siglip2 siglip2_vision_model step3p7 timesfm timesfm2_5 tipsv2_dpt udop "
        "uvdoc video_llama_3_vision vitpose voxtral_realtime wav2vec2-bert xcodec zamba2 "
    ),
    "transformers names a class that it has not": ("evolla voxtral_realtime_text "),
}
# their eager layers mistake the float mask made for "eager" for a boolean one and hide what is visible; "sdpa" is right
EAGER_IS_WRONG = ("nemotron_asr_streaming", "nemotron_asr_streaming_encoder", "nemotron3_5_asr")
# none of their layers computes attention: convolutions, recurrences, a Fourier transform
WITHOUT_ATTENTION = (
    "falcon_mamba", "fnet", "focalnet", "mamba", "mobilenet_v1", "mobilenet_v2", "pp_lcnet", "pp_lcnet_v3", "pp_lcnet_v4", "uvdoc_backbone",
    # the last: of its two layers the first mixes by convolution, the second is left out
    "xlstm", "sam3_lite_text_text_model",
)  # fmt: skip
_REASONS = {name: why for why, names in NOT_RUN.items() for name in names.split()}


@pytest.fixture
def calls(monkeypatch):
    """The layers that called our attention function."""
    from transformers import AttentionInterface

    integration.register()
    seen: list[str] = []
    ours = AttentionInterface._global_mapping["saccade"]

    def count(module, *args, **kwargs):
        seen.append(type(module).__name__)
        return ours(module, *args, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, "saccade", count)
    return seen


@pytest.mark.sampled(6)
@pytest.mark.slow
# some models of transformers leave weights as they were allocated
@pytest.mark.unpoisoned
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", tiny_models.model_types())
def test_equal_or_refused(model_type, calls):
    reason = _REASONS.get(model_type)
    if reason is not None and "a class that it has not" in reason:
        pytest.skip(reason)
    model_class = tiny_models.model_class(CONFIG_MAPPING[model_type])
    runs_torch = why_not(model_class) and model_class._supports_sdpa
    if why_not(model_class) and not runs_torch:
        if reason is None:
            with pytest.raises(
                (saccade.UnsupportedProblem, ImportError), match=r"cannot run attn_implementation='saccade'|requires the"
            ):
                tiny_models.make(model_type, "saccade")
        return
    if reason is not None:
        if runs_torch and model_type != "deepseek_ocr2":  # whose layers cannot be made of such numbers
            tiny_models.make(model_type, "saccade")
        pytest.skip(reason)
    assert tiny_models.parameters_of(model_type, "eager") <= tiny_models.MOST_PARAMETERS
    theirs = tiny_models.make(model_type, "sdpa" if model_type in EAGER_IS_WRONG else "eager")
    inputs, expected = _first_that_runs(theirs)
    try:
        ours = tiny_models.make(model_type, "saccade")
        ours.load_state_dict(theirs.state_dict())
        _compare(tiny_models.results_of(ours, inputs), expected)
        assert calls or runs_torch or model_type in WITHOUT_ATTENTION, "no layer ran our attention function, and nobody said so"
        if "input_ids" in inputs and (padded := _padded(theirs, inputs)) is not None:
            _compare(tiny_models.results_of(ours, padded[0]), padded[1])
    except saccade.UnsupportedProblem as refusal:
        if "attn_implementation=" not in str(refusal):
            raise


def _first_that_runs(model):
    failures = []
    for inputs in tiny_models.inputs_of(model):
        try:
            return inputs, tiny_models.results_of(model, inputs)
        except Exception as failure:  # noqa: BLE001 what a model says to inputs that it does not take is not ours to list
            failures.append(f"{sorted(inputs)}: {failure}")
    pytest.fail("no inputs fit: " + "; ".join(failures))


def _padded(model, inputs):
    inputs = {**inputs, "attention_mask": tiny_models.padding()}
    try:
        return inputs, tiny_models.results_of(model, inputs)
    except Exception:  # noqa: BLE001 a model without such a mask, or that takes another
        return None


def _compare(got, expected):
    assert expected
    for path, want in expected.items():
        finite = want.isfinite()
        assert torch.equal(finite, got[path].isfinite()), path
        scale = want[finite].abs().max().item() if finite.any() else 0.0
        error = (got[path] - want)[finite].abs().max().item() if finite.any() else 0.0
        assert error <= 1e-4 * scale + 1e-6, f"{path} is off by {error:.2e} of {scale:.2e}"
