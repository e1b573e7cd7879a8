"""Two data sets that are made while they are read: shapes in noise, needles in haystacks."""

from __future__ import annotations

from abc import ABC, abstractmethod

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

Sample = tuple[Tensor, Tensor]


class Made(Dataset[Sample], ABC):
    """Samples that are made anew each time they are read, always the same by their index.

    Args:
        size: Number of samples, a million at most.
        seed: Decides about all samples; another seed gives other samples.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.seed = seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self.size:
            raise IndexError(index)
        # torch's generators on the CPU know the lower 32 bits of a seed only.
        return self.make(torch.Generator().manual_seed((self.seed * 1_000_003 + index) % 2**32))

    @abstractmethod
    def make(self, generator: torch.Generator) -> Sample:
        """Makes a sample of the generator's numbers."""


class Shapes(Made):
    """Discs (class 1) and hatched squares (class 2) in noise: image (1, s, s), classes (s, s).

    Args:
        size: Number of images.
        seed: Decides about all images.
        image_size: Pixels along one side of an image.
        num_shapes: Shapes in an image; a later one lies over an earlier one.
    """

    def __init__(self, size: int, seed: int, image_size: int, num_shapes: int) -> None:
        super().__init__(size, seed)
        self.image_size = image_size
        self.num_shapes = num_shapes

    def make(self, generator: torch.Generator) -> Sample:
        extent = self.image_size
        image = torch.randn(extent, extent, generator=generator) / 2
        places = torch.arange(extent)
        shining = torch.ones(extent, extent)
        hatched = (2.0 * (places // 2 % 2)).expand(extent, extent)
        light, mask = torch.zeros(extent, extent), torch.zeros(extent, extent, dtype=torch.long)
        for _ in range(self.num_shapes):
            x, y, size, kind = torch.rand(4, generator=generator).tolist()
            half = extent * (0.05 + 0.1 * size)
            rows, columns = (places - y * extent).abs()[:, None], (places - x * extent).abs()
            disc = kind < 0.5
            inside = rows.hypot(columns) < half if disc else rows.maximum(columns) < half
            light = torch.where(inside, shining if disc else hatched, light)
            mask[inside] = 1 if disc else 2
        return (image + light).unsqueeze(0), mask


class Needles(Made):
    """Needles of two kinds in a haystack: codes (length,), class ().

    Either the code 0 or 1 is in the first half, either 2 or 3 in the second, and all else is hay:
    16 other codes. There is a class for each pair, so that both kinds have to be found.

    Args:
        size: Number of sequences.
        seed: Decides about all sequences.
        length: Codes of a sequence, an even number.
        num_needles: Needles of a kind, some of which may be at the same place.
    """

    def __init__(self, size: int, seed: int, length: int, num_needles: int) -> None:
        super().__init__(size, seed)
        self.length = length
        self.num_needles = num_needles

    def make(self, generator: torch.Generator) -> Sample:
        half = self.length // 2
        codes = torch.randint(4, 20, (2, half), generator=generator)
        places = torch.randint(half, (2, self.num_needles), generator=generator)
        first, second = torch.randint(2, (2,), generator=generator)
        codes[0, places[0]] = first
        codes[1, places[1]] = 2 + second
        return codes.flatten(), 2 * first + second


class MadeDataModule(L.LightningDataModule):
    """Loaders of samples for training, validation and test, none of which has one of another.

    Args:
        batch_size: Samples in a batch, for each replica of the model.
        num_samples: Samples for training; a quarter of it for validation and for test.
        seed: Decides about all samples.
    """

    def __init__(self, batch_size: int, num_samples: int, seed: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_samples = num_samples
        self.seed = seed

    def samples(self, size: int, seed: int) -> Made:
        """Describes `size` samples."""
        raise NotImplementedError

    def setup(self, stage: str | None = None) -> None:
        sizes = (self.num_samples, self.num_samples // 4, self.num_samples // 4)
        parts = [self.samples(size, 3 * self.seed + part) for part, size in enumerate(sizes)]
        self.train, self.val, self.test = parts

    def train_dataloader(self) -> DataLoader[Sample]:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Sample]:
        return DataLoader(self.val, batch_size=self.batch_size)

    def test_dataloader(self) -> DataLoader[Sample]:
        return DataLoader(self.test, batch_size=self.batch_size)

    def predict_dataloader(self) -> DataLoader[Sample]:
        return self.test_dataloader()


class ShapesDataModule(MadeDataModule):
    """Discs and hatched squares in noise: images (batch, 1, s, s), classes of pixels (batch, s, s).

    Args:
        batch_size: Images in a batch, for each replica of the model.
        num_samples: Images for training; a quarter of it for validation and for test.
        image_size: Pixels along one side of an image.
        num_shapes: Shapes in an image.
        seed: Decides about all images.
    """

    def __init__(
        self,
        batch_size: int = 8,
        num_samples: int = 96,
        image_size: int = 256,
        num_shapes: int = 6,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, num_samples, seed)
        self.image_size = image_size
        self.num_shapes = num_shapes

    def samples(self, size: int, seed: int) -> Shapes:
        return Shapes(size, seed, self.image_size, self.num_shapes)


class NeedlesDataModule(MadeDataModule):
    """Needles in haystacks: codes (batch, length), classes (batch,).

    Args:
        batch_size: Sequences in a batch, for each replica of the model.
        num_samples: Sequences for training; a quarter of it for validation and for test.
        length: Codes of a sequence, an even number.
        num_needles: Needles of a kind.
        seed: Decides about all sequences.
    """

    def __init__(
        self,
        batch_size: int = 8,
        num_samples: int = 256,
        length: int = 4096,
        num_needles: int = 8,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, num_samples, seed)
        self.length = length
        self.num_needles = num_needles

    def samples(self, size: int, seed: int) -> Needles:
        return Needles(size, seed, self.length, self.num_needles)
