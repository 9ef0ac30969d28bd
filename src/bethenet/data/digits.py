"""The digits of the paper's section 4.2: scikit-learn's 8 x 8 images and their one-pixel shifts, binarised.

Two splits. `paper_digits` is the paper's own, row for row: the shifts are split at random, so that most held-out rows
are near copies of training rows (`near_copies` counts them). `clean_digits` splits the original images *before* they
are shifted, and has a validation part, so that nothing need be chosen on the test part.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

from bethenet.data.images import BinaryImages, split_rows

SIDE = 8
SHIFTS = ((-1, 0), (0, -1), (0, 1), (1, 0))
"""(rows, columns) by which the copies are moved, in the order in which they stand in the data."""

Images = NDArray[np.float32]


def paper_digits() -> BinaryImages:
    """The paper's data: 7188 training rows, and 1797 held-out rows as the test part.

    The 1797 images and four shifts of each, scaled pixel by pixel over all 8985 rows, split at random, rounded. There
    is no validation part: the paper chose its settings on the rows it reports.
    """
    rows = with_shifts(original_digits())
    scaled = (rows - rows.min(0)) / (rows.max(0) + np.float32(1e-4))
    train, test = train_test_split(np.round(scaled), test_size=0.2, random_state=0)
    return BinaryImages(_tensor(train), _tensor(test), shape=(SIDE, SIDE))


def clean_digits(*, validation: float = 0.1, test: float = 0.2, seed: int = 0, shifts: bool = True) -> BinaryImages:
    """The same images split by original image: an image and its shifts are always in one part.

    Args:
        validation: the fraction of the 1797 originals held out for choices; 0 leaves that part out.
        test: the fraction held out for the figures reported.
        seed: which random split.
        shifts: whether each part also holds its images' shifts (five rows an image, images first) or images only.
    """
    originals = original_digits()
    parts = [
        originals[rows.numpy()] for rows in split_rows(len(originals), validation=validation, test=test, seed=seed)
    ]
    if shifts:
        parts = [with_shifts(part) for part in parts]
    # the scale is learnt from the training part alone
    low, high = parts[0].min(0), parts[0].max(0)
    train, valid, held_out = [_tensor(np.round((part - low) / (high + np.float32(1e-4))).clip(0, 1)) for part in parts]
    return BinaryImages(train, held_out, valid if len(valid) else None, shape=(SIDE, SIDE))


def original_digits() -> Images:
    """scikit-learn's 1797 images ``[images, 64]``, values 0 to 16."""
    return np.asarray(load_digits().data, dtype=np.float32)


def with_shifts(images: Images) -> Images:
    """The images, then all of them moved by each of `SHIFTS`; what moves in at the edge is 0."""
    return np.concatenate([images] + [_shifted(images, *shift) for shift in SHIFTS])


def near_copies(rows: Tensor, others: Tensor) -> tuple[int, int]:
    """How many of ``rows`` equal one of ``others``, and how many equal a one-pixel shift of one of ``others``."""
    wanted = [row.tobytes() for row in rows.numpy().astype(np.uint8)]
    images = others.numpy().astype(np.float32)
    same = {row.tobytes() for row in images.astype(np.uint8)}
    near = {row.tobytes() for shift in SHIFTS for row in _shifted(images, *shift).astype(np.uint8)}
    return sum(row in same for row in wanted), sum(row in near for row in wanted)


def _shifted(images: Images, down: int, right: int) -> Images:
    padded = np.pad(images.reshape(-1, SIDE, SIDE), ((0, 0), (1, 1), (1, 1)))
    moved = padded[:, 1 - down : 1 - down + SIDE, 1 - right : 1 - right + SIDE]
    return moved.reshape(len(images), SIDE * SIDE)


def _tensor(rows: Images) -> Tensor:
    return torch.from_numpy(rows.astype(np.uint8))
