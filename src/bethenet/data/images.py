"""Binary images as rows of 0s and 1s, split into parts: what a Boltzmann machine is trained and judged on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from sklearn.model_selection import train_test_split
from torch import Tensor


@dataclass(frozen=True)
class BinaryImages:
    """Binary images ``[images, pixels]`` of 0s and 1s (uint8), row by row of pixels, in parts that share no image."""

    train: UInt8[Tensor, "train pixels"]
    test: UInt8[Tensor, "test pixels"]
    """What figures are reported on; choose nothing by it."""
    validation: UInt8[Tensor, "validation pixels"] | None = None
    """What hyperparameters and epochs are chosen by, where the split has such a part."""
    shape: tuple[int, int] | None = None
    """Rows and columns of one image, where known."""

    def __post_init__(self) -> None:
        pixels = self.train.shape[1]
        if self.shape is not None and math.prod(self.shape) != pixels:
            raise ValueError(f"shape: expected rows and columns of {pixels} pixels, got {self.shape}")

    @property
    def pixels(self) -> int:
        """How many pixels an image has."""
        return self.train.shape[1]

    @classmethod
    def from_array(
        cls,
        images: Any,
        *,
        threshold: float | None = 0.5,
        validation: float = 0.1,
        test: float = 0.1,
        seed: int = 0,
        generator: torch.Generator | None = None,
    ) -> BinaryImages:
        """Split and binarise a user's images.

        Args:
            images: an array, tensor or nested list ``[images, pixels]`` or ``[images, rows, columns]``.
            threshold: see `binarise`.
            validation: the fraction of the images held out for choices; 0 leaves that part out.
            test: the fraction held out for the figures reported.
            seed: which random split.
            generator: see `binarise`.
        """
        array = check_images(images)
        shape = (array.shape[1], array.shape[2]) if array.dim() == 3 else None
        binary = binarise(array, threshold=threshold, generator=generator)
        train, valid, held_out = split_rows(len(binary), validation=validation, test=test, seed=seed)
        return cls(binary[train], binary[held_out], binary[valid] if len(valid) else None, shape)


def binarise(
    images: Any, *, threshold: float | None = 0.5, generator: torch.Generator | None = None
) -> UInt8[Tensor, "images pixels"]:
    """Images as rows of 0s and 1s.

    Args:
        images: an array, tensor or nested list ``[images, pixels]`` or ``[images, rows, columns]``.
        threshold: 1 where a pixel is above it, in the pixels' own units. ``None``: each pixel is drawn to be 1 with its
            value as the probability (so all values must lie in [0, 1]).
        generator: what the drawing takes its random numbers from.
    """
    array = check_images(images).flatten(1)
    if threshold is not None:
        return (array > threshold).to(torch.uint8)
    low, high = (float(array.min()), float(array.max())) if array.numel() else (0.0, 0.0)
    if low < 0 or high > 1:
        raise ValueError(
            f"stochastic binarisation takes pixels as probabilities from 0 to 1; got values from {low:g} to {high:g} "
            "(divide by the largest first, or give a threshold)"
        )
    uniforms = torch.rand(array.shape, generator=generator, dtype=array.dtype, device=array.device)
    return (uniforms < array).to(torch.uint8)


def check_images(images: Any) -> Tensor:
    """``images`` as a floating-point tensor ``[images, pixels]`` or ``[images, rows, columns]``.

    Raises:
        ValueError: another number of axes, no images or pixels, or a value that is not finite (the image is named).
    """
    try:
        array = images if isinstance(images, Tensor) else torch.from_numpy(np.array(images))
    except (TypeError, ValueError) as error:
        raise ValueError(f"images: expected an array of numbers; {error}") from None
    if array.dim() not in (2, 3) or array.numel() == 0:
        raise ValueError(
            f"images: expected shape [images, pixels] or [images, rows, columns], none of them 0; got "
            f"{list(array.shape)}"
        )
    if array.is_complex():
        raise ValueError("images: expected real numbers, got complex ones")
    array = array if array.is_floating_point() else array.to(torch.float32)
    finite = torch.isfinite(array).flatten(1).all(1)
    if not bool(finite.all()):
        raise ValueError(f"images: image {int(torch.nonzero(~finite)[0])} holds a value that is not finite")
    return array


def split_rows(count: int, *, validation: float, test: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """A random partition of ``0 .. count-1`` into training, validation and test rows, by fractions of the whole."""
    for name, fraction in (("validation", validation), ("test", test)):
        if not 0 <= fraction < 1:
            raise ValueError(f"{name}: expected a fraction of at least 0 and below 1, got {fraction}")
    sizes = [round(count * fraction) for fraction in (validation, test)]
    if sum(sizes) >= count or sizes[1] == 0:
        raise ValueError(
            f"{count} images cannot be split into a test part of {test:g}, a validation part of {validation:g} and "
            "training images"
        )
    rows = np.arange(count)
    rest, held_out = train_test_split(rows, test_size=sizes[1], random_state=seed)
    if sizes[0] == 0:
        return torch.from_numpy(rest), torch.empty(0, dtype=torch.long), torch.from_numpy(held_out)
    train, valid = train_test_split(rest, test_size=sizes[0], random_state=seed)
    return torch.from_numpy(train), torch.from_numpy(valid), torch.from_numpy(held_out)
