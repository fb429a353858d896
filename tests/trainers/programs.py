"""The trainers: what pip installs, the program as its users have it, and the lines that Ablate needs in it."""

import difflib
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_X_TRANSFORMERS = """
import argparse

import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--steps", type=int, default=20)
arguments = parser.parse_args()
torch.manual_seed(arguments.seed)
torch.set_num_threads(1)
layers = Decoder(dim=128, depth=3, heads=4)
model = AutoregressiveWrapper(TransformerWrapper(num_tokens=256, max_seq_len=129, attn_layers=layers))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(arguments.steps):
    rows = torch.randint(0, 256, (8, 129))
    loss = model(rows)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"METRIC last_loss={loss.item()}")
"""

_TRANSFORMERS = """
import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--steps", type=int, default=20)
options = parser.parse_args()
set_seed(options.seed)
torch.set_num_threads(1)
data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 512, (4096, 128))]
model = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=128, n_embd=128, n_layer=3, n_head=4))
arguments = TrainingArguments(
    output_dir="out", per_device_train_batch_size=8, learning_rate=1e-3, seed=options.seed, max_steps=options.steps,
    logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    include_num_input_tokens_seen=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=data)
trainer.train()
"""

_LITGPT = '''
import argparse
import sys
from pathlib import Path

import torch
from litgpt.args import EvalArgs, TrainArgs
from litgpt.config import Config
from litgpt.data import DataModule
from litgpt.pretrain import setup


class RandomTokens(DataModule):
    """Rows of random tokens, so that nothing is downloaded."""

    def connect(self, tokenizer=None, batch_size=1, max_seq_length=None):
        self.batch_size, self.length = batch_size, max_seq_length

    def train_dataloader(self):
        rows = torch.randint(0, 512, (4096, self.length + 1))
        return torch.utils.data.DataLoader(rows, batch_size=self.batch_size)

    val_dataloader = train_dataloader


parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--steps", type=int, default=20)
options = parser.parse_args()
sys.argv[1:] = ["pythia-14m"]  # it reads them once more when it saves the model
torch.set_num_threads(1)
setup(
    model_name="pythia-14m",
    model_config=Config.from_name("pythia-14m", n_layer=3, padded_vocab_size=512, block_size=128),
    out_dir=Path("out"),
    precision="32-true",
    data=RandomTokens(),
    train=TrainArgs(
        save_interval=None, log_interval=10, global_batch_size=8, micro_batch_size=8, max_norm=1.0, lr_warmup_steps=5,
        max_tokens=8 * 128 * options.steps,
    ),
    eval=EvalArgs(interval=100_000, max_iters=1, final_validation=False),
    devices=1,
    logger_name="csv",
    seed=options.seed,
)
'''


@dataclass(frozen=True, kw_only=True)
class OtherTrainer:
    """A trainer of other people."""

    name: str
    requires: tuple[str, ...]
    """What pip installs, with versions."""
    program: str
    """The script of a user, without marks."""
    edits: tuple[tuple[str, str], ...]
    """Lines of the script, or of the file of the package that it uses, and what stands there with marks."""
    edited: str | None = None
    """File of the package whose loop is marked, as a module beside the script; None where the script has the loop."""
    imported: tuple[str, str] | None = None
    """The script's line that imports that file, and the line that imports the copy."""
    line: str
    """What the unchanged program prints about its loss, with {} in place of the number."""
    env: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[int, int] = (4, 30)
    """Warm-up and timed steps."""

    def write(self, folder: Path, site: Path) -> int:
        """Write the marked program below `folder`; return the number of changed lines."""
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(__file__).with_name("plant.py"), folder)
        script = self.program.lstrip()
        if self.edited is None:
            marked = _edited(script, self.edits)
            (folder / "train.py").write_text(marked, encoding="utf-8")
            changed = changed_lines(script, marked)
        else:
            before = (site / self.edited).read_text(encoding="utf-8")
            marked = _edited(before, self.edits)
            (folder / "marked.py").write_text(marked, encoding="utf-8")
            assert self.imported is not None
            (folder / "train.py").write_text(_edited(script, (self.imported,)), encoding="utf-8")
            changed = changed_lines(before, marked) + 1
        (folder / "plain.py").write_text(script, encoding="utf-8")
        return changed

    def install(self, prefix: Path) -> Path:
        """Install the trainer into an environment of its own at `prefix`; return its folder of packages."""
        if not (prefix / "installed").exists():
            subprocess.run([sys.executable, "-m", "venv", str(prefix)], check=True)
            subprocess.run([str(prefix / "bin" / "pip"), "install", "-q", *self.requires], check=True)
            (prefix / "installed").write_text("\n".join(self.requires), encoding="utf-8")
        (site,) = prefix.glob("lib/python*/site-packages")
        return site


def _edited(text: str, edits: tuple[tuple[str, str], ...]) -> str:
    for before, after in edits:
        if text.count(before) != 1:
            raise SystemExit(f"{before!r} is there {text.count(before)} times; the package has another version")
        text = text.replace(before, after)
    return text


def changed_lines(before: str, after: str) -> int:
    """Return how many lines of `after` are new or changed."""
    return sum(line.startswith("+ ") for line in difflib.ndiff(before.splitlines(), after.splitlines()))


TRAINERS = {
    trainer.name: trainer
    for trainer in (
        OtherTrainer(
            name="x-transformers",
            requires=("x-transformers==2.31.10",),
            program=_X_TRANSFORMERS,
            line="METRIC last_loss={}",
            edits=(
                ("import argparse\n", "import argparse\nimport ablate\n"),
                ("for _ in range(arguments.steps):", "for step in ablate.steps(arguments.steps, seed=arguments.seed):"),
                (
                    "    optimizer.zero_grad()\n",
                    "    optimizer.zero_grad()\n    step.report(loss=loss, tokens=8 * 128)\n",
                ),
            ),
        ),
        OtherTrainer(
            name="transformers",
            requires=("transformers[torch]==5.24.0",),
            program=_TRANSFORMERS,
            line="'train_loss': '{}'",
            edits=(
                ("import argparse\n", "import argparse\nimport ablate\n"),
                (
                    "trainer = Trainer(model=model, args=arguments, train_dataset=data)\ntrainer.train()\n",
                    "with ablate.trial(seed=options.seed) as trial:\n"
                    "    marks = ablate.trainer_callback(trial)\n"
                    "    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[marks])\n"
                    "    trainer.train()\n",
                ),
            ),
        ),
        OtherTrainer(
            name="litgpt",
            requires=("litgpt==0.5.13", "requests", "litdata"),
            program=_LITGPT,
            line="loss train: {},",
            edited="litgpt/pretrain.py",
            imported=("from litgpt.pretrain import setup", "from marked import setup"),
            edits=(
                ("import math\n", "import math\nimport ablate\n"),
                (
                    "    for train_data in train_iterator:\n",
                    "    for step, train_data in zip(ablate.steps(seed=torch.initial_seed()), train_iterator):\n",
                ),
                (
                    '            state["step_count"] += 1\n',
                    '            state["step_count"] += 1\n        step.report(loss=loss, tokens=input_ids.numel())\n',
                ),
            ),
            env={"TORCHDYNAMO_DISABLE": "1"},  # its torch.compile would take most of a trial on two cores
        ),
    )
}
"""By name."""
