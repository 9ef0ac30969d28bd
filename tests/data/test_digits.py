import numpy as np
import pytest
import torch
from scipy.ndimage import convolve
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from bethenet.data import BinaryImages, binarise, clean_digits, paper_digits
from bethenet.data.digits import SHIFTS, near_copies, original_digits, with_shifts


def nudged() -> np.ndarray:
    """The four shifts as 3 x 3 convolutions, image by image."""
    images = np.asarray(load_digits().data, "float32")
    kernels = [
        [[0, 1, 0], [0, 0, 0], [0, 0, 0]],
        [[0, 0, 0], [1, 0, 0], [0, 0, 0]],
        [[0, 0, 0], [0, 0, 1], [0, 0, 0]],
        [[0, 0, 0], [0, 0, 0], [0, 1, 0]],
    ]
    moved = [[convolve(i.reshape(8, 8), mode="constant", weights=k).ravel() for i in images] for k in kernels]
    return np.concatenate([images, *map(np.array, moved)])


def test_paper_split_is_the_published_recipe_row_for_row() -> None:
    rows = nudged()
    assert np.array_equal(with_shifts(original_digits()), rows)
    scaled = (rows - rows.min(0)) / (rows.max(0) + 0.0001)
    train, test = train_test_split(scaled, test_size=0.2, random_state=0)
    data = paper_digits()
    assert data.train.shape == (7188, 64)
    assert data.test.shape == (1797, 64)
    assert data.validation is None
    assert np.array_equal(data.train.numpy(), np.round(train))
    assert np.array_equal(data.test.numpy(), np.round(test))
    # so that a change in scikit-learn's images or split is noticed
    assert (int(data.train.sum()), int(data.test.sum())) == (128466, 31981)


def test_paper_split_leaks_and_the_clean_one_does_not() -> None:
    data = paper_digits()
    same, near = near_copies(data.test, data.train)
    assert (same, near) == (66, 1408)
    clean = clean_digits()
    same, near = near_copies(clean.test, clean.train)
    # different images that coincide once they are binarised remain, of 1795 rows
    assert (same, near) == (37, 38)


def test_clean_split_keeps_an_image_and_its_shifts_together() -> None:
    data = clean_digits(seed=3)
    assert data.validation is not None
    sizes = [len(part) for part in (data.train, data.validation, data.test)]
    assert sizes == [5 * 1258, 5 * 180, 5 * 359]
    plain = clean_digits(seed=3, shifts=False)
    assert len(plain.test) == 359
    for part, images in ((data.train, plain.train), (data.test, plain.test)):
        # a shift only loses pixels, up to the scale's rounding: the copies in a part are copies of its own images
        original, *moved = part.reshape(5, len(images), 8, 8).float()
        for copy, (down, right) in zip(moved, SHIFTS, strict=True):
            back = copy.roll((-down, -right), (1, 2))[:, 1:-1, 1:-1]
            agreement = (back == original[:, 1:-1, 1:-1]).float().mean((1, 2))
            assert float(agreement.mean()) > 0.95
    assert not torch.equal(clean_digits(seed=4).test, data.test)
    assert torch.equal(clean_digits(seed=3).test, data.test)
    assert clean_digits(validation=0).validation is None


def test_user_arrays_are_binarised() -> None:
    generator = torch.Generator().manual_seed(0)
    grey = np.linspace(0, 1, 20 * 6).reshape(20, 2, 3)
    data = BinaryImages.from_array(grey, validation=0.2, test=0.25)
    assert (len(data.train), len(data.test), data.shape, data.pixels) == (11, 5, (2, 3), 6)
    assert data.validation is not None
    together = torch.cat([data.train, data.validation, data.test])
    assert int(together.sum()) == int((grey > 0.5).sum())
    assert torch.equal(binarise([[0, 3], [7, 8]], threshold=4), torch.tensor([[0, 0], [1, 1]], dtype=torch.uint8))
    drawn = binarise(torch.full((4000, 1), 0.3), threshold=None, generator=generator)
    assert abs(float(drawn.float().mean()) - 0.3) < 4 * (0.21 / 4000) ** 0.5
    extremes = binarise([[0.0, 1.0]] * 50, threshold=None, generator=generator)
    assert torch.equal(extremes, torch.tensor([[0, 1]] * 50, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("images", "options", "message"),
    [
        ([1.0, 2.0], {}, r"expected shape \[images, pixels\]"),
        (np.zeros((0, 3)), {}, "none of them 0"),
        ([[0.0, float("nan")]], {}, "image 0 holds"),
        ([[0.0], [3.0]], {"threshold": None}, "from 0 to 3"),
        (["words"], {}, "expected"),
        ([[1j]], {}, "real"),
    ],
)
def test_wrong_images_are_named(images: object, options: dict[str, None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        binarise(images, **options)


@pytest.mark.parametrize(("validation", "test"), [(0.5, 0.5), (-0.1, 0.2), (0.1, 1.0), (0.1, 0.0)])
def test_wrong_fractions_are_refused(validation: float, test: float) -> None:
    with pytest.raises(ValueError, match=r"split|fraction"):
        BinaryImages.from_array(torch.zeros(10, 3), validation=validation, test=test)


def test_wrong_shape_is_refused() -> None:
    rows = torch.zeros(2, 6, dtype=torch.uint8)
    with pytest.raises(ValueError, match="6 pixels"):
        BinaryImages(rows, rows, shape=(2, 2))
