"""A page's picture as vectors of its patches, and which of them a query is nearest to, as with ColPali.

The model is tiny and random, made here, so the picture of scores means nothing; with "vidore/colpali-v1.3-hf" in its
place it would show where on the page the answer stands. Needs `pip install 'anypool[multimodal]'`.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    ColPaliConfig,
    ColPaliForRetrieval,
    ColPaliProcessor,
    PaliGemmaConfig,
    PreTrainedTokenizerFast,
    SiglipImageProcessor,
)

from anypool import LLM

SIDE, PATCH = 112, 14  # pixels of a picture and of a patch
GRID = SIDE // PATCH
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def write_model(folder: Path) -> None:
    """A ColPali of two layers, with a tokenizer of bytes."""
    tokens = ["<pad>", "<bos>", "<eos>", "<image>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        extra_special_tokens=["<image>"],
    )
    images = SiglipImageProcessor(size={"height": SIDE, "width": SIDE})
    images.image_seq_length = GRID * GRID
    processor = ColPaliProcessor(images, tokenizer)
    vision = {"model_type": "siglip_vision_model", "image_size": SIDE, "patch_size": PATCH, "vision_use_head": False}
    text = {"model_type": "gemma", "vocab_size": len(tokenizer), "head_dim": 8, "num_key_value_heads": 1}
    config = PaliGemmaConfig(
        vision_config={**SIZES, **vision, "projection_dim": SIZES["hidden_size"]},
        text_config={**SIZES, **text, "pad_token_id": 0, "max_position_embeddings": 512},
        projection_dim=SIZES["hidden_size"],
        image_token_id=processor.image_token_id,
    )
    torch.manual_seed(0)
    ColPaliForRetrieval(ColPaliConfig(vlm_config=config, embedding_dim=16)).save_pretrained(folder)
    processor.save_pretrained(folder)


def draw_page(words: str, colour: str) -> Image.Image:
    """A page with a line of text and a box."""
    page = Image.new("RGB", (SIDE, SIDE), "white")
    pen = ImageDraw.Draw(page)
    pen.text((8, 8), words, fill="black")
    pen.rectangle((16, 56, 64, 96), fill=colour)
    return page


def main(folder: Path) -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    write_model(folder)
    pages = [draw_page("revenue in 2024", "navy"), draw_page("a cat on a mat", "orange"), draw_page("", "green")]
    with LLM(folder, device="cpu", use_tqdm_on_load=False) as llm:
        prompts = [{"multi_modal_data": {"image": page}} for page in pages]
        query, *vectors = (one.outputs.data for one in llm.token_embed(["orange box", *prompts], use_tqdm=False))
        print(f"query: {len(query)} vectors; page: {len(vectors[0])}, {GRID**2} of them of patches")
        for place in llm.rerank("orange box", prompts, use_tqdm=False):
            maxsim = (query @ vectors[place.index].T).amax(dim=1).sum()
            same = abs(float(maxsim) - place.relevance_score) < 1e-4
            print(f"page {place.index}: {place.relevance_score:.3f}, as the sum of the best patches: {same}")
        similarity = (query @ vectors[1][: GRID**2].T).amax(dim=0).view(GRID, GRID)
    shades = (similarity - similarity.min()) / (similarity.max() - similarity.min())
    heat = Image.fromarray((255 * shades).to(torch.uint8).numpy()).resize((SIDE, SIDE), Image.Resampling.NEAREST)
    target = folder / "patches.png"
    Image.merge("RGB", (heat, *pages[1].split()[1:])).save(target)
    print(f"wrote {target.name} of {SIDE} x {SIDE} pixels")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as made:
            main(Path(made))
