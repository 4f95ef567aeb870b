"""The command line of all training and evaluation.

    python -m lightning_modules.cli {fit,validate,test,predict} --config X.yaml [--config OVERLAY.yaml] [--key value]

In:  YAML files, looked up in the working directory and then in lightning_modules/configs/, and options that override
     them. The model and data classes are named in the YAML (`class_path`), so every stage goes through here.
Out: runs/NAME/ (NAME is --name, by default X): checkpoints/, tensorboard/, metrics.json, config.yaml, export/.
design.md section 3. A mistake of the user's is one message and exit code 2, never a traceback.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's calls, not ours

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden

from callbacks.checkpoint import RunCheckpoints
from callbacks.progress import TrainingProgress
from callbacks.rng import RngState
from callbacks.run_record import RunRecord, read_metrics
from callbacks.throughput import GradientNorm, Throughput
from lightning_modules.messages import check_yaml, explain
from lightning_modules.report import print_report
from lightning_modules.runs import check_checkpoint, claim, run_directory

CONFIGS = Path(__file__).parent / "configs"
ROOT = Path(__file__).resolve().parents[1]
OWN_PACKAGES = tuple(
    str(ROOT / name) for name in ("inference", "datamodules", "callbacks", "lightning_modules")
)


class UsageError(ValueError):
    """A mistake on the command line or in a YAML file."""


class TraceParser(LightningArgumentParser):
    """A parser whose errors are one line, without the page of usage in front of it."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise instead of printing usage and exiting."""
        raise UsageError(plain_error(message)) from ex


class TraceCLI(LightningCLI):
    """LightningCLI with run directories, YAML lookup, and YAML that always wins over a checkpoint's settings."""

    def __init__(self, args: Sequence[str] | None = None) -> None:
        arguments = list(sys.argv[1:] if args is None else args)
        if arguments and arguments[0].partition("=")[0] in ("--config", "-c"):
            raise UsageError(
                f"the command stands first: {{fit,validate,test,predict}} {' '.join(arguments[:2])} …"
            )
        self.arguments, self.config_files = find_configs(arguments)
        super().__init__(
            LightningModule, LightningDataModule,
            subclass_mode_model=True, subclass_mode_data=True, parser_class=TraceParser, save_config_callback=None,
            auto_configure_optimizers=False, load_from_checkpoint_support=False, seed_everything_default=42,
            trainer_defaults={
                "callbacks": [RngState(), Throughput(), GradientNorm(), LearningRateMonitor("step")],
                "enable_model_summary": False,
            },
            args=self.arguments,
        )  # fmt: skip

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds where a run goes, and the callbacks every run has."""
        parser.add_argument(
            "--name", type=str | None, default=None, help="name of the run: runs/NAME (default: the YAML's)"
        )
        parser.add_argument("--overwrite", action="store_true", help="replace the run that runs/NAME holds")
        parser.add_lightning_class_args(RunCheckpoints, "checkpoint")
        parser.add_lightning_class_args(TrainingProgress, "progress")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parses; an error names the file it is in."""
        try:
            self.config = parser.parse_args(args)
            self._check_numbers()
        except UsageError as error:
            raise UsageError(explain(str(error), self.config_files, self.arguments)) from None

    def _check_numbers(self) -> None:
        """UsageError for numbers of the Trainer that only fail somewhere deep in a library."""
        options = self.config[self.config.subcommand]
        seed, accumulate = options.get("seed_everything"), options.trainer.get("accumulate_grad_batches")
        if seed is not True and seed is not False and not 0 <= (seed or 0) < 2**32:
            raise UsageError(f"seed_everything is {seed}: it must be from 0 to 4294967295")
        if accumulate is not None and accumulate < 1:
            raise UsageError(f"trainer.accumulate_grad_batches is {accumulate}: it must be 1 or more")

    def _parse_ckpt_path(self) -> None:
        """Only checks that a checkpoint to resume is there.

        Lightning would let the checkpoint's hyper-parameters override the YAML and the command line
        (https://github.com/Lightning-AI/pytorch-lightning/pull/21455), and only where the path is a file.
        """
        command = self.config.subcommand
        path = self.config[command].get("ckpt_path")
        if path == "last":
            path = str(self._run_directory(command) / "checkpoints" / "last.ckpt")
            self.config[command]["ckpt_path"] = path
        if path is not None:
            check_checkpoint(path)

    def before_instantiate_classes(self) -> None:
        """Points checkpoints into the run directory."""
        command = self.config.subcommand
        options = self.config[command]
        # jsonargparse hides what a strategy says of itself, so this is asked before one is made.
        strategy = getattr(options["trainer"]["strategy"], "class_path", "")
        if strategy == "lightning_modules.zero2.Zero2Strategy" and find_spec("deepspeed") is None:
            raise UsageError(
                "trainer.strategy is DeepSpeed ZeRO-2, and deepspeed is not installed: "
                "pip install -c constraints.txt -e '.[train,gpu]', or train without it: --trainer.strategy ddp"
            )
        self.run = self._run_directory(command)
        options["checkpoint"]["directory"] = str(self.run / "checkpoints")
        if options.get("weights_only") is None:
            options["weights_only"] = True  # no pickle is ever loaded

    def after_instantiate_classes(self) -> None:
        """Claims the run directory, now that everything the command names was found."""
        command = self.config.subcommand
        options = self.config[command]
        needs = {"test": ("test_step",), "predict": ("predict_step", "forward")}.get(command, ())
        if needs and not any(is_overridden(name, self.model, LightningModule) for name in needs):
            raise UsageError(f"{type(self.model).__name__} has no {command}: use validate, or fit")
        if rank_zero_only.rank == 0:
            claim(self.run, resuming=options.get("ckpt_path") is not None, overwrite=options["overwrite"])
            if command == "fit" or not (self.run / "config.yaml").exists():
                saved = self._parser(command).dump(options, skip_unset=False, skip_link_targets=False)
                (self.run / "config.yaml").write_text(saved, encoding="utf-8")

    def _run_directory(self, command: str) -> Path:
        name = self.config[command]["name"]
        if name is None:
            stem = Path(self.config_files[0]).stem if self.config_files else command
            name = f"validate-{stem}" if command == "validate" else stem
            self.config[command]["name"] = name
        return run_directory(name)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The Trainer with the run's logger and record."""
        settings = self._get(self.config_init, "trainer", default={})
        settings["default_root_dir"] = str(self.run)
        if settings.get("logger") in (None, True):
            settings["logger"] = TensorBoardLogger(str(self.run), name="", version="tensorboard")
        if self.subcommand in (
            "fit",
            "validate",
        ):  # among the defaults, because those come after RunCheckpoints
            callbacks = [*self.trainer_defaults["callbacks"], RunRecord(str(self.run))]
            self.trainer_defaults = {**self.trainer_defaults, "callbacks": callbacks}
        return super().instantiate_trainer(**kwargs)

    def _run_subcommand(self, subcommand: str) -> None:
        """Runs the command; Ctrl-C ends it with what to type to go on (Lightning turns it into a silent exit)."""
        try:
            super()._run_subcommand(subcommand)
        except SystemExit as error:
            if isinstance(error.__context__, KeyboardInterrupt) and rank_zero_only.rank == 0:
                last = self.run / "checkpoints" / "last.ckpt"
                how = (
                    f"resume with --ckpt_path {last}"
                    if last.exists()
                    else "there is no checkpoint to resume yet"
                )
                print(f"interrupted: {how}", file=sys.stderr)
            raise

    def after_fit(self) -> None:
        """Prints held-out metrics before and after, where things are, and what to type next."""
        if self.trainer.is_global_zero:
            print_report(self.run, read_metrics(self.run), self.trainer)


def find_configs(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Replace every `--config X` by a path that exists.

    Returns:
        The arguments, and the files in order.

    Raises:
        FileNotFoundError: X is neither in the working directory nor among the shipped ones.
    """
    found, files = [], []
    expects_file = False
    for argument in arguments:
        prefix, equals, value = argument.partition("=")
        if expects_file:
            files.append(find_config(argument))
            argument = files[-1]
        elif equals and prefix in ("--config", "-c"):
            files.append(find_config(value))
            argument = f"{prefix}={files[-1]}"
        expects_file = argument in ("--config", "-c")
        found.append(argument)
    return found, files


def find_config(name: str) -> str:
    """The file a `--config` value means: in the working directory, else in lightning_modules/configs/."""
    for path in (Path(name), CONFIGS / name):
        if path.is_file():
            check_yaml(str(path))
            return str(path)
    shipped = ", ".join(sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.yaml")))
    raise FileNotFoundError(f"--config {name}: no such file here or in {CONFIGS}. Shipped: {shipped}")


def plain_error(message: str) -> str:
    """jsonargparse's message without its hints."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return (
        " ".join(line for line in lines if not line.startswith(("Given value", "tip:", "For more")))
        or message
    )


class Say(logging.Handler):
    """Prints this project's own lines as they are."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line."""
        print(self.format(record), flush=True)


# What libraries say that does not concern the user.
CHATTER = (
    ".*does not have many workers.*",
    ".*is smaller than the logging interval.*",
    ".*Checkpoint directory.*",
    ".*missing from font.*",
    ".*LeafSpec.*",
    ".*`isinstance\\(treespec.*",
    ".*does not seem to be available.*",
    ".*in eval mode.*",
    ".*was deprecated in v4.*",
    ".*JsonargparseDeprecationWarning.*",
    ".*overridden `transfer_batch_to_device`.*",
)


def quiet() -> None:
    """Silence library chatter and let our own lines through (of the main process)."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for pattern in CHATTER:
        warnings.filterwarnings("ignore", f"(?s){pattern}")
    ours = logging.getLogger("trace_memory")
    ours.setLevel(logging.INFO if rank_zero_only.rank == 0 else logging.ERROR)
    if not any(isinstance(handler, Say) for handler in ours.handlers):
        ours.addHandler(Say())


def users_mistake(error: BaseException | None) -> str | None:
    """The message meant for the user, if the error is one: raised by this project's own code, not inside a library.

    jsonargparse wraps what a class raises while it is made; then the wrapped error speaks.
    """
    message = None
    while error is not None:
        if isinstance(error, UsageError):
            return str(error)
        frames = traceback.extract_tb(error.__traceback__)
        own = bool(frames) and str(Path(frames[-1].filename).resolve()).startswith(OWN_PACKAGES)
        # Lightning's own judgement of the Trainer's settings, such as a GPU where there is none.
        device = bool(frames) and frames[-1].filename.endswith("accelerator_connector.py")
        kinds = (ValueError, FileNotFoundError, FileExistsError, MisconfigurationException)
        if isinstance(error, kinds) and (own or device):
            message = f"trainer.accelerator, trainer.devices: {error}" if device else str(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return message


def main(args: Sequence[str] | None = None) -> int:
    """Run a command; 0, or 2 after a message about the user's mistake."""
    quiet()
    try:
        TraceCLI(args)
    except Exception as error:
        message = users_mistake(error)
        if message is None:
            raise
        print(f"error: {message}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
