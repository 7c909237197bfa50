"""A reward model as a component of a run's rewards: a sequence classifier with one label that scores a conversation.

Contract:
- A model stands beside the reward functions of a `RewardSet`: weight, gate, metrics, and functions that need its verdict
  work alike. It is scored by actors of its own (`reward_workers.reward_model_worker`), never in a reward process.
- Its value is the normalised score; the score itself is kept as metric `raw`. A score that is not finite is an error.
- Normalisation is a fixed function of one score. Statistics that follow the scores of the run are refused by design: two
  replicas would disagree, and a resumed run with itself. Comparing the answers of a group is the advantage's business.

What can be known before a run starts is raised as `RewardFunctionError`: a path that leads nowhere, a model without such a
head, a tokenizer without chat template, more tokens than the model's context. This module costs nothing to import.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from reward_workers.function import RewardFunctionError
from rollout_workers.trajectory import RewardResult, Status

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ENGINES = ("transformers", "vllm")
NORMALISATIONS = (None, "sigmoid", "standard")
DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class Normalisation:
    """A score as a reward. `kind` None leaves it, `sigmoid` is 1 / (1 + e^-score), `standard` (score - mean) / std.

    What comes out is cut to [-clip, clip] where `clip` is given. Raises ValueError for options that don't fit.
    """

    kind: str | None = None
    mean: float | None = None
    std: float | None = None
    clip: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in NORMALISATIONS:
            raise ValueError(f"normalise={self.kind}: expected null, sigmoid or standard")
        given = [name for name in ("mean", "std") if getattr(self, name) is not None]
        if self.kind == "standard" and len(given) < 2:
            raise ValueError(
                "normalise=standard needs mean and std, measured on answers of the starting policy: they are fixed for the "
                f"whole run; given {', '.join(given) or 'neither'}"
            )
        if self.kind != "standard" and given:
            raise ValueError(
                f"{' and '.join(given)} belong to normalise=standard, found normalise={self.kind or 'null'}"
            )
        if self.std is not None and not (math.isfinite(self.std) and self.std > 0):
            raise ValueError(f"std={self.std}: expected a finite number above 0")
        if self.mean is not None and not math.isfinite(self.mean):
            raise ValueError(f"mean={self.mean}: expected a finite number")
        if self.clip is not None and not (math.isfinite(self.clip) and self.clip > 0):
            raise ValueError(f"clip={self.clip}: expected a finite number above 0")

    def __call__(self, score: float) -> float:
        value = score
        if self.kind == "sigmoid":
            # Of the negative size, so that nothing overflows.
            small = math.exp(-abs(score))
            value = (1.0 if score >= 0 else small) / (1.0 + small)
        elif self.mean is not None and self.std is not None:
            value = (score - self.mean) / self.std
        return value if self.clip is None else max(-self.clip, min(self.clip, value))


@dataclass(frozen=True)
class RewardModel:
    """A named reward model with its weight.

    `path` is a folder (made absolute) or a hub id. `gate` is the value, after normalisation, that it must reach, or nothing
    else counts (`RewardSet`). A conversation of more than `max_tokens` is refused, never cut: its end is the answer. None
    stands for the model's context, `batch_tokens` at most; that is the size of one forward pass, padding included.

    Raises RewardFunctionError, naming the model, for values that can't be.
    """

    name: str
    path: str
    engine: str = "transformers"
    weight: float = 1.0
    gate: float | None = None
    dtype: str = "bfloat16"
    max_tokens: int | None = None
    batch_tokens: int = 16384
    normalisation: Normalisation = Normalisation()
    needs: ClassVar[None] = None  # as of a function that needs no other's verdict

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", self.name):
            raise RewardFunctionError(f"a reward's name is letters, digits and _ . -, got {self.name!r}")
        for what, value, choices in (("engine", self.engine, ENGINES), ("dtype", self.dtype, DTYPES)):
            if value not in choices:
                raise self.error(f"{what}={value}: expected {' or '.join(choices)}")
        if not math.isfinite(self.weight):
            raise self.error(f"its weight is {self.weight}")
        if self.gate is not None and not math.isfinite(self.gate):
            raise self.error(f"the value that it must reach is {self.gate}")
        for what, tokens in (("max_tokens", self.max_tokens), ("batch_tokens", self.batch_tokens)):
            if tokens is not None and tokens < 1:
                raise self.error(f"{what}={tokens}: expected at least 1")
        if self.max_tokens is not None and self.max_tokens > self.batch_tokens:
            raise self.error(
                f"max_tokens={self.max_tokens} is above batch_tokens={self.batch_tokens}: one conversation must fit a "
                "forward pass; raise batch_tokens or lower max_tokens"
            )
        folder = Path(self.path).expanduser()
        if folder.exists():
            object.__setattr__(self, "path", str(folder.resolve()))

    def error(self, problem: str) -> RewardFunctionError:
        return RewardFunctionError(f"reward model {self.name!r}: {problem}")

    def verdict(self, score: float) -> RewardResult:
        """What a score is worth. A number that is not finite is an error, not a reward."""
        if not math.isfinite(score):
            return RewardResult(None, Status.ERRORED, detail={"error": f"the model's score is {score}"})
        return RewardResult(self.normalisation(score), metrics={"raw": score})

    def token_limit(self) -> int:
        """The longest conversation that it scores, in its own tokens. Raises RewardFunctionError as `check_options`."""
        context = getattr(self._config().get_text_config(), "max_position_embeddings", None)
        if self.max_tokens is None:
            return min(self.batch_tokens, context or self.batch_tokens)
        if context is not None and self.max_tokens > context:
            raise self.error(f"max_tokens={self.max_tokens}, and {self.path} has a context of {context}")
        return self.max_tokens

    def check_options(self) -> None:
        """Whether the model is there and can score conversations; reads its configuration and tokenizer, not its weights.

        Raises RewardFunctionError.
        """
        from transformers import AutoTokenizer
        from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

        config = self._config()
        architectures = list(getattr(config, "architectures", None) or [])
        # A language model's own folder would load all the same, with a head of random numbers.
        if not any(name.endswith("ForSequenceClassification") for name in architectures):
            raise self.error(
                f"{self.path} is {', '.join(architectures) or 'of no named architecture'}; expected a sequence-classification "
                "model (config.json: architectures: [...ForSequenceClassification])"
            )
        if self.engine == "transformers" and type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
            raise self.error(f"transformers has no sequence-classification model of type {config.model_type}")
        if config.num_labels != 1:
            raise self.error(
                f"{self.path} has {config.num_labels} labels; a reward needs a head with one (config.json: num_labels, id2label)"
            )
        try:
            tokenizer = AutoTokenizer.from_pretrained(self.path)
        except (OSError, ValueError) as error:
            raise self.error(f"the tokenizer of {self.path} can't be loaded: {error}") from error
        if not tokenizer.chat_template:
            raise self.error(
                f"the tokenizer of {self.path} has no chat template; conversations are scored in the form it was trained on"
            )
        self.token_limit()

    def _config(self) -> PretrainedConfig:
        from transformers import AutoConfig

        folder = Path(self.path)
        if folder.is_dir() and not (folder / "config.json").is_file():
            raise self.error(f"the folder {self.path} has no config.json, it is not a Hugging Face model")
        try:
            return AutoConfig.from_pretrained(self.path)
        except (OSError, ValueError) as error:
            if folder.is_dir():
                raise self.error(f"the configuration of {self.path} can't be read: {error}") from error
            raise self.error(f"there is no folder {self.path}, and no such model on the hub: {error}") from error
