"""Tiny random models that read images, written by transformers and sentence-transformers themselves."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers as hf
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from tests.helpers import edit_json, new_folder

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
VISION = {**TEXT, "image_size": 28, "patch_size": 14}


def picture(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    """A picture of random colours."""
    pixels = numpy.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=numpy.uint8)
    return Image.fromarray(pixels)


def byte_tokenizer(
    special: tuple[str, ...] = (), *, template: str = "$A", side: str = "right", **settings: Any
) -> hf.PreTrainedTokenizerFast:
    """Byte-level BPE without merges, with these special tokens beside <pad>, <s> and </s>."""
    first = ["<pad>", "<s>", "</s>", *special]
    vocab = {token: i for i, token in enumerate([*first, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if template != "$A":
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        padding_side=side,
        additional_special_tokens=list(special),
        **settings,
    )


def save(model: Any, processor: Any, name: str) -> Path:
    folder = new_folder(name)
    with torch.no_grad():
        for parameter in model.parameters():  # fresh biases and norms are 0 and 1, which hides what is done with them
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.eval().save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@cache
def clip_folder(eos: int = 2) -> Path:
    """CLIP; with `eos=3` its text tower looks for that token rather than for the highest id."""
    tokenizer = byte_tokenizer(("<x>",), template="<s> $A </s>", model_max_length=48)
    if eos == 2:  # the end of a text has the highest id, as in CLIP's vocabulary
        vocab = {token: i for i, token in enumerate(["<pad>", "<s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
        vocab["</s>"] = len(vocab)
        backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", vocab["</s>"])]
        )
        tokenizer = hf.PreTrainedTokenizerFast(
            tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=48
        )
    torch.manual_seed(0)
    config = hf.CLIPConfig(
        text_config={
            **TEXT,
            "vocab_size": len(tokenizer),
            "max_position_embeddings": 48,
            "eos_token_id": 2 if eos == 2 else tokenizer.eos_token_id,
            "bos_token_id": 1,
            "pad_token_id": 0,
        },
        vision_config=VISION,
        projection_dim=24,
    )
    images = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    return save(hf.CLIPModel(config), hf.CLIPProcessor(images, tokenizer), "clip")


@cache
def siglip_folder() -> Path:
    tokenizer = byte_tokenizer(template="$A </s>", model_max_length=40)
    torch.manual_seed(1)
    config = hf.SiglipConfig(
        text_config={**TEXT, "vocab_size": len(tokenizer), "max_position_embeddings": 40, "projection_size": 32},
        vision_config=VISION,
    )
    images = SiglipImageProcessorPil(size={"height": 28, "width": 28})
    return save(hf.SiglipModel(config), hf.SiglipProcessor(images, tokenizer), "siglip")


LANGUAGE = {**TEXT, "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1}


@cache
def llava_folder() -> Path:
    tokenizer = byte_tokenizer(("<image>",), template="<s> $A")
    torch.manual_seed(2)
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**VISION),
        text_config=hf.LlamaConfig(**LANGUAGE, vocab_size=len(tokenizer), eos_token_id=2),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
    )
    images = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    processor = hf.LlavaProcessor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    return save(hf.LlavaForConditionalGeneration(config), processor, "llava")


@cache
def paligemma_folder() -> Path:
    processor = _paligemma_processor(hf.PaliGemmaProcessor)
    torch.manual_seed(3)
    return save(hf.PaliGemmaForConditionalGeneration(_paligemma_config(processor)), processor, "paligemma")


@cache
def colpali_folder(side: int = 28) -> Path:
    """ColPali, which reads a picture as a square of `side` pixels."""
    processor = _paligemma_processor(hf.ColPaliProcessor, side)
    torch.manual_seed(4)
    config = hf.ColPaliConfig(vlm_config=_paligemma_config(processor, side), embedding_dim=16)
    return save(hf.ColPaliForRetrieval(config), processor, "colpali")


def _paligemma_processor(cls: Any, side: int = 28) -> Any:
    images = SiglipImageProcessorPil(size={"height": side, "width": side})
    images.image_seq_length = (side // VISION["patch_size"]) ** 2
    return cls(images, byte_tokenizer(("<image>",)))


def _paligemma_config(processor: Any, side: int = 28) -> hf.PaliGemmaConfig:
    vision = {**VISION, "image_size": side, "model_type": "siglip_vision_model", "vision_use_head": False}
    return hf.PaliGemmaConfig(
        vision_config={**vision, "projection_dim": 32},
        text_config={**LANGUAGE, "model_type": "gemma", "head_dim": 8, "vocab_size": len(processor.tokenizer)},
        projection_dim=32,
        image_token_id=processor.image_token_id,
    )


QWEN_TOKENS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN_TOKENS += ("<|endoftext|>",)


def _qwen_config(tokenizer: Any, cls: Any = hf.Qwen2VLConfig, **vision: Any) -> Any:
    ids = tokenizer.convert_tokens_to_ids
    return cls(
        text_config={
            **LANGUAGE,
            "vocab_size": len(tokenizer),
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]},
        },
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 7, **vision},
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
    )


def _qwen_images() -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(patch_size=7, merge_size=2, min_pixels=14 * 14, max_pixels=60 * 60)


def _save_qwen(model: Any, tokenizer: Any, name: str) -> Path:
    """Its processor has a part for videos, which needs torchvision: the file that it would write is written here."""
    folder = save(model, tokenizer, name)
    images = _qwen_images()
    content = {"processor_class": "Qwen2VLProcessor", "image_processor": images.to_dict()}
    (folder / "processor_config.json").write_text(json.dumps(content))
    (folder / "preprocessor_config.json").write_text(json.dumps(images.to_dict()))
    return folder


@cache
def qwen2_vl_folder() -> Path:
    tokenizer = byte_tokenizer(QWEN_TOKENS)
    torch.manual_seed(5)
    return _save_qwen(hf.Qwen2VLForConditionalGeneration(_qwen_config(tokenizer)), tokenizer, "qwen2-vl")


@cache
def qwen2_5_vl_folder() -> Path:
    tokenizer = byte_tokenizer(QWEN_TOKENS)
    torch.manual_seed(6)
    vision = {"intermediate_size": 48, "out_hidden_size": 32, "window_size": 28, "fullatt_block_indexes": [1]}
    config = _qwen_config(tokenizer, hf.Qwen2_5_VLConfig, **vision)
    return _save_qwen(hf.Qwen2_5_VLForConditionalGeneration(config), tokenizer, "qwen2-5-vl")


@cache
def colqwen2_folder() -> Path:
    tokenizer = byte_tokenizer(QWEN_TOKENS, side="left")
    torch.manual_seed(7)
    config = hf.ColQwen2Config(vlm_config=_qwen_config(tokenizer), embedding_dim=16)
    return save(hf.ColQwen2ForRetrieval(config), hf.ColQwen2Processor(_qwen_images(), tokenizer), "colqwen2")


IDEFICS_TOKENS = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
IDEFICS_TOKENS += tuple(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2))


def _idefics_images() -> Any:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    return Idefics3ImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})


@cache
def idefics3_folder() -> Path:
    """Its images are cut into tiles, of which the processor makes one array for all images of a prompt."""
    tokenizer = byte_tokenizer(IDEFICS_TOKENS)
    torch.manual_seed(8)
    config = hf.Idefics3Config(
        vision_config={**TEXT, "image_size": 28, "patch_size": 7},
        text_config={**LANGUAGE, "model_type": "llama", "vocab_size": len(tokenizer)},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=0,
    )
    processor = hf.Idefics3Processor(_idefics_images(), tokenizer, image_seq_len=4)
    return save(hf.Idefics3ForConditionalGeneration(config), processor, "idefics3")


@cache
def colmodernvbert_folder() -> Path:
    tokenizer = byte_tokenizer(IDEFICS_TOKENS)
    torch.manual_seed(9)
    config = hf.ColModernVBertConfig(
        vlm_config=hf.ModernVBertConfig(
            text_config={
                "model_type": "modernbert",
                **TEXT,
                "vocab_size": len(tokenizer),
                "max_position_embeddings": 512,
                "pad_token_id": 0,
                "local_attention": 12,
                "num_hidden_layers": 4,
            },
            vision_config={**TEXT, "image_size": 28, "patch_size": 7, "model_type": "siglip_vision_model"},
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
            pixel_shuffle_factor=2,
        ),
        embedding_dim=16,
    )
    processor = hf.ColModernVBertProcessor(_idefics_images(), tokenizer, image_seq_len=4)
    return save(hf.ColModernVBertForRetrieval(config), processor, "colmodernvbert")


@cache
def gemma3_folder() -> Path:
    """Its image tokens see one another in both directions, its layers slide or not."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    named = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    tokenizer = byte_tokenizer(tuple(named.values()), template="<s> $A", extra_special_tokens=named)
    ids = {
        name.replace("token", "token_index"): tokenizer.convert_tokens_to_ids(token) for name, token in named.items()
    }
    torch.manual_seed(10)
    kinds = ["sliding_attention", "full_attention"]
    config = hf.Gemma3Config(
        text_config={
            **LANGUAGE,
            "head_dim": 8,
            "vocab_size": len(tokenizer),
            "sliding_window": 6,
            "layer_types": kinds,
        },
        vision_config={**VISION, "vision_use_head": False},
        mm_tokens_per_image=4,
        **ids,
    )
    images = Gemma3ImageProcessorPil(size={"height": 28, "width": 28}, do_pan_and_scan=False)
    processor = hf.Gemma3Processor(images, tokenizer, image_seq_length=4)
    return save(hf.Gemma3ForConditionalGeneration(config), processor, "gemma3")


@cache
def qwen3_vl_folder() -> Path:
    """Layers of its vision tower give to layers of its language model directly."""
    tokenizer = byte_tokenizer(QWEN_TOKENS)
    torch.manual_seed(11)
    config = _qwen_config(
        tokenizer,
        hf.Qwen3VLConfig,
        depth=3,
        intermediate_size=48,
        out_hidden_size=32,
        spatial_merge_size=2,
        deepstack_visual_indexes=[0, 1],
        num_position_embeddings=64,
    )
    config.text_config.head_dim = 8
    folder = _save_qwen(hf.Qwen3VLForConditionalGeneration(config), tokenizer, "qwen3-vl")
    edit_json(folder / "processor_config.json", lambda content: {**content, "processor_class": "Qwen3VLProcessor"})
    return folder


@cache
def llava_next_folder() -> Path:
    """Its images are cut into as many tiles as their shape asks for."""
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

    tokenizer = byte_tokenizer(("<image>",), template="<s> $A")
    torch.manual_seed(12)
    grids = [[28, 56], [56, 28], [56, 56]]
    config = hf.LlavaNextConfig(
        vision_config=hf.CLIPVisionConfig(**VISION),
        text_config=hf.LlamaConfig(**LANGUAGE, vocab_size=len(tokenizer), eos_token_id=2),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
        image_grid_pinpoints=grids,
    )
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=grids
    )
    processor = hf.LlavaNextProcessor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    return save(hf.LlavaNextForConditionalGeneration(config), processor, "llava-next")
