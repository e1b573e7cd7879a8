"""An ordinary Lightning script; the import and `strategy="pipeline"` put half of it on each device.

python examples/quickstart.py
"""

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

import lightning_pipeline  # noqa: F401


class Digits(L.LightningModule):
    def __init__(self, width: int = 32, depth: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.amax(dim=(2, 3)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        accuracy = (self(batch[0]).argmax(dim=1) == batch[1]).float().mean()
        self.log("val_acc", accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main(strategy: str = "pipeline", devices: int = 2, epochs: int = 5) -> float:
    L.seed_everything(1)
    images, labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    digits = TensorDataset(images.view(-1, 1, 8, 8).float() / 16, labels)
    train, val = random_split(digits, [1500, 297])
    trainer = L.Trainer(accelerator="auto", devices=devices, strategy=strategy, max_epochs=epochs)
    train_loader = DataLoader(train, batch_size=64, shuffle=True)
    trainer.fit(Digits(), train_loader, DataLoader(val, batch_size=64))
    accuracy = float(trainer.callback_metrics["val_acc"])
    if trainer.is_global_zero:
        print(f"validation accuracy: {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
