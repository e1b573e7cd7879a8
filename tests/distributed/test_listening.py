"""What a run on one host listens at: the address that its ranks were told, and no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, os, sys
import lightning as L, psutil, torch
from lightning_pipeline import PipelineStrategy

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)])
    def training_step(self, batch):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

class Look(L.Callback):
    def on_train_batch_end(self, trainer, *args):
        connections = psutil.Process().net_connections("inet")
        places = [c.laddr[0] for c in connections if c.status == psutil.CONN_LISTEN]
        with open(f"rank{trainer.global_rank}.json", "w") as file:
            json.dump(places, file)

strategy = PipelineStrategy(start_method=sys.argv[1])
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=1,
                    callbacks=[Look()], **quiet)
trainer.fit(Net(), torch.utils.data.DataLoader(torch.ones(8, 4), 4))
"""


@pytest.mark.launcher
@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["fork", "popen"])
def test_ranks_of_one_host_listen_at_its_loopback_alone(tmp_path: Path, start_method: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MASTER_", "GLOO_"))}
    subprocess.run(
        [sys.executable, "script.py", start_method],
        cwd=tmp_path,
        env={**kept, "PYTHONPATH": str(Path(__file__).parents[2])},
        check=True,
        timeout=120,
    )
    places = {rank: json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)}
    assert places[0] and places[1]  # the store and gloo; gloo
    assert {place for rank in places.values() for place in rank} <= {"127.0.0.1", "::1"}, places
