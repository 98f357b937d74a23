"""Items to classify that clients send: texts, pairs of texts, and images as data URLs.

A classifier of images takes paths of files. A string of a client is never such a path: it must be a data URL, whose image is
checked before it is decoded and written to a temporary file.
"""

from __future__ import annotations

import base64
import binascii
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.inference.classifier import Classifier, Prediction
from regard.serve.api_errors import ApiError, limit_error

if TYPE_CHECKING:
    from regard.serve.service import Service

FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP")
MAX_PIXELS = 1 << 24


def classify_items(service: Service, classifier: Classifier, items: Sequence[Any]) -> list[Prediction]:
    """Return the predictions for texts, pairs of texts, or images: data URLs or their bytes."""
    service.check_limit("texts", len(items), "max_texts", "input")
    if not items:
        raise ApiError(400, "input is empty: give at least one text", param="input", code="invalid_value")
    if classifier.package.task != "image-classification":
        if any(isinstance(item, bytes) for item in items):
            raise ApiError(400, "this model classifies texts, not images", param="input")
        texts = [part for item in items for part in ([item] if isinstance(item, str) else item)]
        service.check_texts(texts, "input")
        return classifier.classify([item if isinstance(item, str) else tuple(item) for item in items])
    with tempfile.TemporaryDirectory(prefix="regard-") as folder:
        return classifier.classify([write_image(item, Path(folder) / str(i)) for i, item in enumerate(items)])


def write_image(item: Any, path: Path) -> Path:
    """Write the image of a data URL, or of bytes, to a file."""
    path.write_bytes(check_image(item if isinstance(item, bytes) else decode_data_url(item)))
    return path


def decode_data_url(item: Any) -> bytes:
    """Return the bytes of a data URL in base64; nothing is ever fetched."""
    head, _, data = item.partition(",") if isinstance(item, str) else ("", "", "")
    if not head.startswith("data:image/") or not head.endswith(";base64"):
        raise ApiError(400, "an image is given as a data URL: data:image/png;base64,...", param="input")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise ApiError(400, "the data URL of an image is not base64", param="input") from None


def check_image(content: bytes) -> bytes:
    """Return the bytes of an image of a known format whose number of pixels, by its header, is not too large."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            pixels = image.width * image.height
    except Exception:  # what a decoder raises for damaged files has many types
        raise ApiError(400, f"this is no image of a known format ({', '.join(FORMATS)})", param="input") from None
    if pixels > MAX_PIXELS:
        raise limit_error("pixels of an image", pixels, MAX_PIXELS, "fixed", "input")
    return content
