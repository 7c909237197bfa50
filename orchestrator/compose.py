"""From `conf/` and overrides to a checked `Config`.

Hydra composes the groups over the schema, so an unknown or mistyped key is refused with its full name before anything
starts. Mappings whose keys are the user's own (sources, reward functions, options) take new keys without Hydra's «+»; a
whole mapping given at once, `data.eval={}`, replaces what was there, as a list does.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, Sweep
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from orchestrator.checks import validate
from orchestrator.config import Config, ConfigError
from orchestrator.derived import learning_rate

CONF_DIR = Path(__file__).resolve().parent.parent / "conf"
# What Hydra and OmegaConf refuse an override with. The last: a list's element where there is no list.
_REFUSALS = (HydraException, OmegaConfBaseException, AssertionError)


def load(overrides: Sequence[str] = (), check: Callable[[Config], None] = validate) -> Config:
    """Compose `conf/` with Hydra overrides, convert and check. Raises ConfigError naming the key."""
    overrides = flat(overrides)
    refuse_unknown(overrides)
    _store_schema()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        try:
            composed = compose("config", overrides=[o for o in overrides if not _OWN_KEYS.match(o)])
            for override in filter(_OWN_KEYS.match, overrides):
                _merge(composed, override)
            config = OmegaConf.to_object(composed)
        except _REFUSALS as error:
            raise ConfigError(_explain(error, overrides)) from error
    assert isinstance(config, Config)
    return _checked(config, check)


@functools.cache
def _store_schema() -> None:
    ConfigStore.instance().store("schema", node=Config)


def changed(config: Config, overrides: Sequence[str], check: Callable[[Config], None] = validate) -> Config:
    """A configuration that there is already, with other values of single keys. Raises ConfigError naming the key."""
    overrides = flat(overrides)
    refuse_unknown(overrides)
    composed = OmegaConf.structured(config)
    try:
        for override in overrides:
            if (CONF_DIR / override.partition("=")[0]).is_dir():
                raise ConfigError(f"{override}: here only single keys can be changed, not the choice of a config group")
            _merge(composed, override)
        merged = OmegaConf.to_object(composed)
    except _REFUSALS as error:
        raise ConfigError(_explain(error, overrides)) from error
    assert isinstance(merged, Config)
    return _checked(merged, check)


def _checked(config: Config, check: Callable[[Config], None]) -> Config:
    """Checked, with a learning rate (what is written down is the figure that null stands for) and without «~» in folders."""
    check(config)
    config.learner.learning_rate = learning_rate(config)
    for owner, name in (
        (config.run, "dir"),
        (config.profile, "out"),
        (config.doctor, "out"),
        (config.check_rewards, "out"),
        (config.replay, "run"),
        (config.simulate, "output"),
        (config.simulate, "from_run"),
    ):
        if (folder := getattr(owner, name)) is not None:
            setattr(owner, name, os.path.expanduser(folder))
    return config


# What Hydra can't add to without «+», or at all where it is null: these overrides are merged in after it composed.
_OWN_KEYS = re.compile(
    r"\+{0,2}(?P<mapping>data\.(train|eval)|reward\.(functions|models)|eval\.checker|reward\.watch\.checker"
    r"|model\.chat_template_kwargs|rollout\.engine_options|algorithm\.\w+_options)(?P<inside>\.[^=]+)?="
)


def is_own_key(override: str) -> bool:
    """Whether it is in one of the mappings whose keys are the user's own, which Hydra by itself does not take."""
    return _OWN_KEYS.match(override) is not None


def _merge(composed: DictConfig, override: str) -> None:
    """Carry out an override of one of the user's own mappings, its value read by Hydra's grammar."""
    parsed = _parsed(override.lstrip("+"))
    value: Any = parsed.value()
    if _holds_sweep(value):
        raise ConfigError(f"{override}: commas outside brackets would be a sweep; a list is written key=[a,b]")
    matched = _OWN_KEYS.match(override)
    if matched and not matched["inside"] and (mapping := OmegaConf.select(composed, matched["mapping"])) is not None:
        # The keys of a checker are its type's: it is made anew instead of emptied.
        if dataclasses.is_dataclass(OmegaConf.get_type(mapping)):
            OmegaConf.update(composed, matched["mapping"], None)
        else:
            with open_dict(mapping):
                mapping.clear()
    for part in reversed(parsed.key_or_group.split(".")):
        value = {part: value}
    try:
        with open_dict(composed):
            composed.merge_with(value)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{override}: {error}{_none_hint([override])}") from error


def flat(overrides: Iterable[str]) -> list[str]:
    """The same overrides, where a whole node of the schema is given at once (`run={name: mine}`) with one for each of its keys.

    Hydra would demand a «+» of `data={train: {mine: ...}}`, and add or miss keys without saying which one may be meant. A sweep
    over whole nodes stays as it is. Raises ConfigError for what is no override.
    """
    found: list[str] = []
    for override in overrides:
        if not isinstance(override, str):
            raise ConfigError(f"{override!r}: an override is a text, key=value")
        node = _WHOLE_NODE.match(override)
        if node is None or is_own_key(override) or not _is_node(node["key"]):
            found.append(override)
            continue
        try:
            value: Any = _parsed(override).value()
        except HydraException as error:
            raise ConfigError(_explain(error, [override])) from error
        if isinstance(value, Sweep):
            found.append(override)
        elif _holds_sweep(value):
            raise ConfigError(f"{override}: a sweep can't stand inside a value")
        else:
            found += flat(f"{node['key']}.{name}={literal(item)}" for name, item in value.items())
    return found


def _holds_sweep(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, Sweep | Glob) or any(map(_holds_sweep, parts))


def given(overrides: Sequence[str], key: str) -> str | None:
    """What flat overrides set a key to, as text; None where they don't, or to null."""
    pairs = [override.lstrip("+").partition("=") for override in overrides]
    values = [value.strip("'\"") for name, _, value in pairs if name == key]
    return values[-1] if values and values[-1] not in ("", "null") else None


def _parsed(override: str) -> Override:
    [parsed] = OverridesParser.create().parse_overrides([override])
    return parsed


_WHOLE_NODE = re.compile(r"\+{0,2}(?P<key>[\w.]+)=\s*\{")


def _is_node(key: str) -> bool:
    """Whether a key of the schema has keys of its own below it."""
    kind: Any = Config
    for part in key.split("."):
        kind = get_type_hints(kind).get(part)
        if not dataclasses.is_dataclass(kind):
            return False
    return True


def refuse_unknown(overrides: Sequence[str]) -> None:
    """ConfigError for a key that is not in the schema, with the one that may be meant.

    Hydra would advise a «+» for a mistyped key, and a key added with it would be read by nobody.
    """
    for override in overrides:
        _refuse_unknown(override)


def _refuse_unknown(override: str) -> None:
    key, _, value = override.partition("=")
    key = key.lstrip("+~")
    if key and (CONF_DIR / key.partition("@")[0]).is_dir():  # the choice of a config group
        if value in ("null", "None"):
            raise ConfigError(f"{override}: a config group is chosen by name, there is no choice of nothing")
        return
    kind: Any = Config
    path: list[str] = []
    parts = iter(key.split("."))
    for part in parts:
        hints = get_type_hints(kind)
        path.append(part)
        if part not in hints:
            near = difflib.get_close_matches(part, hints, n=1)
            hint = f"; did you mean {'.'.join([*path[:-1], near[0]])}?" if near else ""
            raise ConfigError(f"{'.'.join(path)}: there is no such key{hint} (docs/config.md lists every key)")
        below = [t for t in (hints[part], *get_args(hints[part])) if dataclasses.is_dataclass(t)]
        if not below:
            return
        kind = below[0]
        if get_origin(hints[part]) is dict:
            path.append(next(parts, ""))  # a name of the user's


def literal(value: Any) -> str:
    """A Python value as Hydra's grammar writes it. Texts are quoted: a run may be called 123."""
    if value is None:
        return "null"
    if isinstance(value, str | Path):
        # Backslashes are themselves, except in front of a quotation mark.
        escaped = re.sub(r'(\\*)"', r'\1\1\\"', str(value))
        return '"' + re.sub(r"(\\+)\Z", r"\1\1", escaped) + '"'
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_name(key)}:{literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ",".join(map(literal, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _name(key: Any) -> str:
    """A key of a mapping as Hydra's grammar writes it. It has no quotes for keys: ConfigError for one that it can't hold."""
    escaped = re.sub(r"([\\()\[\]{}:=, \t])", r"\\\1", str(key))
    try:
        value: Any = _parsed(f"key={{{escaped}:0}}").value()
        said = list(value)
    except HydraException:
        said = []
    if said != [key] or isinstance(said[0], str) != isinstance(key, str):
        raise ConfigError(
            f"{key!r}: can't be a key in an override; use letters, digits and «_», and no word such as true or null"
        )
    return escaped


def _explain(error: Exception, overrides: Sequence[str]) -> str:
    """The library's message, with what to do about the mistakes people make most. An AssertionError of another cause is raised."""
    if isinstance(error, AssertionError):
        named = ", ".join(override for override in overrides if re.search(r"\.\d+=", override))
        if not named:
            raise error
        return f"{named}: there is no list yet, give it as a whole: key=[1,2]"
    text = str(error).strip()
    if error.__cause__ is not None and str(error.__cause__) not in text:
        text += f"\n{error.__cause__}"
    for override in overrides:
        if re.search(r"=[^'\"{\[]*=", override):
            text += f"\n{override}: a value with '=' needs quotes for Hydra inside those of the shell: 'key=\"a=b\"' (or a\\=b)."
    if "sweep" in text.lower() or any(re.search(r"^[^=]+=[^'\"\[({]+,", override) for override in overrides):
        text += "\nA list is written key=[1,2]; commas outside brackets would be a sweep."
    if isinstance(error, OverrideParseException) and re.search(r"=[^'\"=]*([~{}()\[\]]|[^\x00-\x7f])", error.override):
        text += f"\n{error.override}: a value with such signs needs quotes for Hydra inside those of the shell: 'key=\"~/a\"'."
    return text + _none_hint(overrides)


def _none_hint(overrides: Sequence[str]) -> str:
    keys = [override.partition("=")[0].lstrip("+") for override in overrides if re.search(r"=(None|none)\Z", override)]
    return "".join(f"\n{key}=None is a text: write {key}=null for no value." for key in keys)
