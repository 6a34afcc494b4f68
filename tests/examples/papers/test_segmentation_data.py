"""Generated streets, and folders in Cityscapes' layout."""

import pickle

import numpy as np
import pytest
from PIL import Image
from segmentation import cityscapes, streets

IDS = np.array([7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33])
SHAPE = (20, 40)


def of_every_index(split, rng_seed=None):
    rngs = (
        None if rng_seed is None else np.random.default_rng((rng_seed, i))
        for i in range(split.size)
    )
    pairs = [split.load(i, rng) for i, rng in enumerate(rngs)]
    return np.stack([image for image, _ in pairs]), np.stack([labels for _, labels in pairs])


@pytest.fixture
def root(tmp_path):
    """Two training cities and one test city, two images each. Labels are all ids in turn."""
    rng = np.random.default_rng(0)
    for side, city in (("train", "aachen"), ("train", "bochum"), ("val", "lindau")):
        for i in range(2):
            name = f"{city}_{i:06}_000019"
            image, labels = (
                tmp_path / kind / side / city / (name + ending)
                for kind, ending in (
                    ("leftImg8bit", "_leftImg8bit.png"),
                    ("gtFine", "_gtFine_labelIds.png"),
                )
            )
            image.parent.mkdir(parents=True, exist_ok=True)
            labels.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (*SHAPE, 3), np.uint8)).save(image)
            ids = np.arange(np.prod(SHAPE)).reshape(SHAPE) % 34
            Image.fromarray(ids.astype(np.uint8)).save(labels)
    return tmp_path


def test_streets_show_every_class_and_some_pixels_without():
    train = streets.streets(num_train=16, num_test=8).train
    images, labels = of_every_index(train)
    assert images.shape == (16, 64, 128, 3)
    assert images.dtype == np.uint8
    assert labels.shape == (16, 64, 128)
    assert labels.dtype == np.int32
    shares = np.bincount(labels.ravel() + 1, minlength=8) / labels.size
    assert shares[0] < 0.2  # -1, at borders
    assert len(shares) == 1 + len(streets.CLASSES)
    assert shares.min() > 0.01


def test_streets_depend_on_seed_part_and_index_alone():
    dataset, again = (streets.streets(32, 48, num_train=4, num_test=4) for _ in range(2))
    other = streets.streets(32, 48, num_train=4, num_test=4, seed=1)
    for rng_seed in (None, 7):
        for a, b in zip(
            of_every_index(dataset.train, rng_seed),
            of_every_index(again.train, rng_seed),
            strict=True,
        ):
            np.testing.assert_array_equal(a, b)
    images, _ = of_every_index(dataset.train)
    everything = [images, of_every_index(dataset.test)[0], of_every_index(other.train)[0]]
    assert len(np.unique(np.concatenate(everything).reshape(12, -1), axis=0)) == 12


def test_augmented_streets_move_labels_with_pixels():
    image = np.arange(32 * 48, dtype=np.int32).reshape(32, 48)
    seen_mirrored = set()
    for seed in range(8):
        pixels, labels = streets.augment(image[..., None], image, np.random.default_rng(seed))
        np.testing.assert_array_equal(pixels[..., 0], labels)
        rows, columns = np.divmod(labels, 48)
        steps = np.diff(columns[0])
        mirrored = bool(steps.sum() < 0)
        assert set(np.abs(steps)) <= {0, 1}  # enlarged
        assert set(np.diff(rows[:, 0])) <= {0, 1}
        assert columns.ptp() if False else np.ptp(columns) >= streets.MIN_CROP * 48 - 2
        seen_mirrored.add(mirrored)
    assert seen_mirrored == {True, False}


def test_border_between_objects_has_no_label():
    _, labels = streets.streets(num_train=1).train.load(0, None)
    for a, b in ((labels[:-1], labels[1:]), (labels[:, :-1], labels[:, 1:])):
        assert not np.any((a != b) & (a >= 0) & (b >= 0))


def test_cityscapes_ids_become_19_classes(root):
    dataset = cityscapes.cityscapes(root, crop=(8, 16))
    assert (dataset.train.size, dataset.test.size, dataset.num_classes) == (4, 2, 19)
    image, labels = dataset.test.load(1, None)
    path = root / "leftImg8bit/val/lindau/lindau_000001_000019_leftImg8bit.png"
    np.testing.assert_array_equal(image, np.asarray(Image.open(path)))
    ids = np.arange(np.prod(SHAPE)).reshape(SHAPE) % 34
    np.testing.assert_array_equal(labels >= 0, np.isin(ids, IDS))
    np.testing.assert_array_equal(IDS[labels[labels >= 0]], ids[labels >= 0])
    assert labels.dtype == np.int32


@pytest.mark.parametrize("crop", [(8, 16), (64, 32)])
def test_cityscapes_crops(root, crop):
    """Crops of any size have labels at their pixels, and none outside the image."""
    for path in (root / "leftImg8bit/train").rglob("*.png"):  # an image that shows its labels
        ids = np.repeat(np.arange(4), 10)[None].repeat(20, axis=0) * 5 + 7
        Image.fromarray(np.repeat(ids[..., None], 3, axis=-1).astype(np.uint8)).save(path)
        name = path.name.replace("leftImg8bit", "gtFine_labelIds")
        Image.fromarray(ids.astype(np.uint8)).save(root / "gtFine/train" / path.parent.name / name)
    train = cityscapes.cityscapes(root, crop).train
    for seed in range(10):
        image, labels = train.load(seed % 4, np.random.default_rng(seed))
        again = train.load(seed % 4, np.random.default_rng(seed))
        np.testing.assert_array_equal(image, again[0])
        np.testing.assert_array_equal(labels, again[1])
        assert image.shape == (*crop, 3)
        assert labels.shape == crop
        outside = np.all(image == cityscapes.GREY, axis=-1)
        assert np.all(labels[outside] == -1)
        assert not outside.all()
        inside = labels >= 0  # ids 7, 12 and 22 have a class, 17 too
        difference = IDS[labels[inside]] - image[inside][:, 0].astype(int)
        assert np.mean(difference == 0) > 0.5  # pixels of a border are mixed
        assert np.abs(difference).max() <= 5


def test_splits_can_be_sent_to_other_processes(root):
    for dataset in (streets.streets(), cityscapes.cityscapes(root, (8, 16))):
        for split in (dataset.train, dataset.test):
            sent = pickle.loads(pickle.dumps(split))
            np.testing.assert_array_equal(sent.load(1, None)[0], split.load(1, None)[0])


def test_errors_name_the_path(root):
    image = root / "leftImg8bit/val/lindau/lindau_000001_000019_leftImg8bit.png"
    labels = root / "gtFine/val/lindau/lindau_000001_000019_gtFine_labelIds.png"
    test = cityscapes.cityscapes(root, (8, 16)).test

    def fails_with(pattern):
        with pytest.raises(ValueError, match=pattern):
            test.load(1, None)

    Image.new("RGB", (40, 20)).save(labels)
    fails_with("lindau_000001.*needs ids of 8 bits")
    Image.new("L", (40, 21)).save(labels)
    fails_with("lindau_000001.*has 21 x 40 labels.*20 x 40 pixels")
    Image.new("RGB", (40, 21)).save(image)
    fails_with("lindau_000001.*has 21 x 40 pixels, but others have 20 x 40")
    image.write_bytes(image.read_bytes()[:50])
    fails_with("lindau_000001_000019_leftImg8bit.png cannot be used")
    labels.unlink()
    with pytest.raises(ValueError, match=r"labels in .*lindau_000001_000019_gtFine_lab"):
        cityscapes.cityscapes(root, (8, 16))


def test_folder_of_something_else_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no image .*leftImg8bit/train"):
        cityscapes.cityscapes(tmp_path, (8, 16))


def test_crop_of_nothing_is_refused(root):
    with pytest.raises(ValueError, match="at least 1 pixel"):
        cityscapes.cityscapes(root, (0, 16))
