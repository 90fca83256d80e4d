"""Images as callers give them -> Pillow's images, in RGB. Whatever is no image, or too large to be one, is refused."""

from __future__ import annotations

import base64
import binascii
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anypool.errors import InvalidPromptError, MissingDependencyError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
# A file of a few kilobytes may say that it holds more pixels than there is memory.
MAX_PIXELS = 50_000_000
_FORMS = "a Pillow image, a uint8 array, the bytes of a file, its path, or a data: URL"


def pillow() -> Any:
    """The module `PIL.Image`, or a `MissingDependencyError` with the command that installs it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependencyError("images need Pillow: pip install 'anypool[multimodal]'") from error
    return Image


def as_image_list(given: Any, where: str) -> tuple[Any, ...]:
    """One image or several, as they are given."""
    images = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    if not images:
        raise InvalidPromptError(f"{where} has no images")
    return images


def open_image(given: Any, where: str) -> Image:
    """An image in RGB; of an animation the first frame.

    Args:
        given: A Pillow image, a `[height, width]` or `[height, width, 1, 3 or 4]` array or tensor of uint8, the bytes
            of a PNG, JPEG, WebP or GIF file, the path of one, or a data: URL that holds one.
        where: What it is, for messages.

    Raises:
        InvalidPromptError: It is none of these, is damaged, or has too many pixels.
        MissingDependencyError: Pillow is not installed.
    """
    module = pillow()
    if isinstance(given, module.Image):
        _check_size(given.size, where)
        return _in_rgb(given, where)
    if isinstance(given, str) and given.startswith("data:"):
        given = decode_data_url(given, where)
    if isinstance(given, (bytes, bytearray, memoryview)):
        return _decode(io.BytesIO(given), where)
    if isinstance(given, str) and given.startswith(("http://", "https://")):
        raise InvalidPromptError(f"{where} is a URL, which is not fetched here: give {_FORMS}")
    if isinstance(given, (str, os.PathLike)):
        try:
            content = Path(given).expanduser().read_bytes()
        except (OSError, ValueError) as error:
            raise InvalidPromptError(f"{where} cannot be read: {error}") from None
        return _decode(io.BytesIO(content), where)
    if hasattr(given, "__array__") or hasattr(given, "numpy"):
        return _from_array(given, where)
    raise InvalidPromptError(f"{where} is of type {type(given).__name__}; give {_FORMS}")


def decode_data_url(url: str, where: str) -> bytes:
    """The bytes that a `data:...;base64,` URL holds."""
    head, comma, body = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise InvalidPromptError(f"{where} is {head!r:.60}; give data:image/png;base64, and the file in base64")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidPromptError(f"{where} is not valid base64: {error}") from None


def _decode(content: io.BytesIO, where: str) -> Image:
    module = pillow()
    try:
        image = module.open(content, formats=FORMATS)
    except module.DecompressionBombError:
        raise InvalidPromptError(f"{where} has far more than {MAX_PIXELS:,} pixels") from None
    except Exception as error:  # decoders raise whatever they meet in a damaged file
        raise InvalidPromptError(f"{where} is no image of the formats {', '.join(FORMATS)}: {_short(error)}") from None
    _check_size(image.size, where)
    try:
        from PIL import ImageOps

        return _in_rgb(ImageOps.exif_transpose(image), where)
    except InvalidPromptError:
        raise
    except Exception as error:
        raise InvalidPromptError(f"{where} is a damaged {image.format} file: {_short(error)}") from None


def _from_array(given: Any, where: str) -> Image:
    import numpy

    array = numpy.asarray(given.numpy() if hasattr(given, "numpy") else given)
    channels = array.shape[2] if array.ndim == 3 else 1
    if array.dtype != numpy.uint8 or array.ndim not in (2, 3) or channels not in (1, 3, 4):
        raise InvalidPromptError(
            f"{where} is an array of {array.dtype} with the shape {list(array.shape)}; "
            "give uint8 with the shape [height, width], or [height, width, channels] with 1, 3 or 4 channels"
        )
    _check_size((array.shape[1], array.shape[0]), where)
    return _in_rgb(pillow().fromarray(array[:, :, 0] if array.ndim == 3 and channels == 1 else array), where)


def _check_size(size: Sequence[int], where: str) -> None:
    width, height = size
    if width * height > MAX_PIXELS:
        raise InvalidPromptError(f"{where} has {width:,} x {height:,} pixels, the limit is {MAX_PIXELS:,} in all")
    if width < 1 or height < 1:
        raise InvalidPromptError(f"{where} has {width} x {height} pixels")


def _in_rgb(image: Image, where: str) -> Image:
    try:
        return image.convert("RGB")
    except (OSError, ValueError) as error:
        raise InvalidPromptError(f"{where} cannot be read: {_short(error)}") from None


def _short(error: Exception) -> str:
    """What went wrong, without the address of the buffer that Pillow names."""
    return str(error).split("<", 1)[0].strip().rstrip(":") or type(error).__name__
