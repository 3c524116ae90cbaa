"""What the benchmark sends, made on the spot: a checkpoint's files, photos and clips."""

import io
import json
from fractions import Fraction
from pathlib import Path

import numpy as np

MODEL = "bench"
CONTEXT_TOKENS = 1 << 20


def write_checkpoint(folder: Path) -> None:
    """config.json and a tokenizer.json of bytes: all of a checkpoint that a gateway reads."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from examples.m3_serving.gateway.families import MiniMaxM3Family

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    family = MiniMaxM3Family
    names = ["]~!b[", "]~b]", "[e~[", *family.placeholder_tokens, *family.bracket_tokens]
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in names]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    text = {"max_position_embeddings": CONTEXT_TOKENS}
    config = {"model_type": family.model_type, "text_config": text}
    (folder / "config.json").write_text(json.dumps(config))


def _scene(height: int, width: int, t: int) -> np.ndarray:
    """A picture that compresses like a photo: smooth shapes that move, and some grain."""
    y, x = np.mgrid[:height, :width].astype(np.float32)
    waves = np.sin(x / 97 + t / 5) + np.cos(y / 71 - t / 7) + np.sin((x + y) / 173)
    grain = np.random.default_rng(t).normal(0, 6, (height, width)).astype(np.float32)
    grey = 128 + 36 * waves + grain
    planes = [grey, grey * 0.8 + x * 40 / width, 255 - grey + y * 30 / height]
    return np.clip(np.stack(planes, -1), 0, 255).astype(np.uint8)


def photo(height: int, width: int, t: int = 0) -> bytes:
    """A JPEG."""
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(_scene(height, width, t)).save(out, "JPEG", quality=90)
    return out.getvalue()


def clip(height: int, width: int, seconds: int, rate: int = 30) -> bytes:
    """An MP4 of H.264."""
    import av

    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream = file.add_stream("libx264", rate=rate, options={"preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for i in range(seconds * rate):
            frame = av.VideoFrame.from_ndarray(_scene(height, width, i), format="rgb24")
            frame.pts, frame.time_base = i, Fraction(1, rate)
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return out.getvalue()
