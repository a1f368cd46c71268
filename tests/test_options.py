"""Config dataclasses: ranges, identity, JSON. Oracle: the rules written out in the tables."""

import dataclasses
import importlib
import json
import math
import pkgutil
import typing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import pytest
from transformers import PreTrainedConfig

import dotmoe
from dotmoe.common.errors import UserError
from dotmoe.common.options import (
    ARGUMENT,
    HOW,
    Range,
    above,
    at_least,
    at_most,
    between,
    check,
    checked,
    from_values,
    values_of,
    what_is_made,
)
from dotmoe.measure.config import EvaluateConfig, TextConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    """Nested."""

    lr: Annotated[float, above(0)] = 0.5
    share: Annotated[float | None, between(0, 1)] = None
    weights: tuple[Annotated[float, above(0)], ...] = ()
    micro: Annotated[int, at_least(1), HOW] = 4

    def check_together(self):
        if self.weights and self.share:
            raise UserError("weights and share are both given. Give one.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    """Top."""

    command: ClassVar[str] = "outer"

    out: Annotated[str, ARGUMENT, HOW]
    inner: Inner = field(default_factory=Inner)
    how: Annotated[Inner, HOW] = field(default_factory=Inner)
    kind: Literal["a", "b"] = "a"
    names: tuple[str, ...] = ()
    level: Annotated[int, at_most(9)] = 0


def outer(**inner):
    return Outer(out="o", inner=Inner(**inner))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (outer(lr=0), "lr is 0, but it must be above 0."),
        (outer(lr=math.nan), "lr is nan, but it must be a finite number."),
        (outer(lr=math.inf), "lr is inf, but it must be a finite number."),
        (outer(share=1.5), "share is 1.5, but it must be 0 to 1."),
        (outer(weights=(1.0, -1.0)), "weights is -1.0, but it must be above 0."),
        (Outer(out="o", level=10), "level is 10, but it must be at most 9."),
        (Outer(out="o", how=Inner(micro=0)), "micro is 0, but it must be at least 1."),
        (outer(share=0.5, weights=(1.0,)), "weights and share are both given. Give one."),
    ],
)
def test_a_number_out_of_its_range_is_refused(config, message):
    with pytest.raises(UserError) as error:
        check(config)
    assert str(error.value) == message


def test_the_ends_of_each_range_are_accepted():
    check(Outer(out="o", inner=Inner(lr=1e-9, share=0.0, weights=(0.1, 2), micro=1), level=9))
    check(outer(share=1.0))


def test_a_config_survives_json_and_lists_are_as_good_as_tuples():
    config = Outer(out="o", inner=Inner(lr=1.0, weights=(1.0, 2.0)), names=("a",))
    values = json.loads(json.dumps(values_of(config)))
    assert values["command"] == "outer"
    assert from_values(Outer, values, "config.json") == config
    assert from_values(Outer, values_of(replace(config, names=["a"])), "config.json") == config
    assert from_values(Outer, {"out": "o", "inner": {"lr": 1}}, "config.json") == outer(lr=1.0)


def test_a_config_made_in_python_may_hold_paths_but_no_empty_text():
    assert checked(Outer(out=Path("a/b"), names=[Path("c")])) == Outer(out="a/b", names=("c",))
    with pytest.raises(UserError, match="the config lacks out"):
        checked(Outer(out=""))


@pytest.mark.parametrize("name", ["MODEL.GGUF", "model.gguf", "folder"])
def test_a_gguf_file_is_known_by_its_name_in_any_case(name, tmp_path):
    file = tmp_path / name
    if name == "folder":
        file = tmp_path / "folder/Model-Q4_0.GGUF"
        file.parent.mkdir()
    file.write_bytes(b"")
    text = TextConfig(text=("x.txt",))
    given = EvaluateConfig(model=str(tmp_path / name), corpus=text, tokenizer="org/model")
    assert checked(given) == given
    with pytest.raises(UserError, match="no model is a GGUF file"):
        checked(replace(given, model=str(tmp_path / "other")))


def test_the_identity_leaves_out_how():
    config = outer()
    assert what_is_made(config) == what_is_made(
        Outer(out="p", inner=Inner(micro=2), how=Inner(lr=9.0))
    )
    assert what_is_made(config) != what_is_made(outer(lr=9.0))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "F is [], but it must be a JSON object with its options."),
        ({"out": "o", "knd": "a"}, "knd in F is no option. Did you mean kind?"),
        ({"out": "o", "inner": {"lrr": 1}}, "lrr in inner of F is no option. Did you mean lr?"),
        ({"out": "o", "level": "1"}, "level in F is '1', which is not int."),
        ({"out": "o", "level": True}, "level in F is True, which is not int."),
        ({"out": "o", "names": [1]}, "names in F is [1], which is not tuple[str, ...]."),
        ({"out": "o", "kind": "c"}, "kind in F is 'c', which is not Literal['a', 'b']."),
        ({"inner": {}}, "F lacks out, which has no default. Add it."),
        ({"out": "o", "command": "inner"}, "F is the config of a dotmoe inner, not of a dotmoe o"),
    ],
)
def test_values_that_are_no_config_are_refused_in_one_line(values, message):
    with pytest.raises(UserError) as error:
        from_values(Outer, values, "F")
    assert str(error.value).startswith(message)


def config_classes():
    """Every dataclass of the package that is a config, or a part of one."""
    for found in pkgutil.walk_packages(dotmoe.__path__, "dotmoe."):
        if not found.name.endswith("__main__"):
            for name, cls in vars(importlib.import_module(found.name)).items():
                is_ours = dataclasses.is_dataclass(cls) and cls.__module__.startswith("dotmoe.")
                # One is that of a checkpoint.
                if is_ours and name.endswith("Config") and not issubclass(cls, PreTrainedConfig):
                    yield cls
                    yield from filter(dataclasses.is_dataclass, typing.get_type_hints(cls).values())


def parts_of(hint):
    """A type and all it is made of, marks included."""
    yield hint
    for part in (*typing.get_args(hint), *getattr(hint, "__metadata__", ())):
        yield from parts_of(part)


def test_every_number_of_every_config_has_a_range():
    classes = set(config_classes())
    assert len(classes) > 20
    for cls in classes:
        for name, hint in typing.get_type_hints(cls, include_extras=True).items():
            parts = list(parts_of(hint))
            if int in parts or float in parts:
                assert any(isinstance(p, Range) for p in parts), f"{cls.__name__}.{name}"
