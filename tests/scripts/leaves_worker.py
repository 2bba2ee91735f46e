"""Gives every leaf of every file of the configuration values that it may not take, and prints what went wrong as JSON.

A process of its own: while tests run, the signatures of scorers and allocators are checked before their own checks are.
"""

import inspect
import json
import os
import sys
import warnings
from pathlib import Path
from types import NoneType, UnionType
from typing import get_args, get_origin

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import OmegaConf

from kvstitch.evaluation import models

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
GROUPS = ("task", "scorer", "allocator", "press", "model")
VALUES = ["abc", -1, 1.5, None, [1], True, {"a": 1}]
# Read by the run and not by the task.
OF_THE_RUN = ("shard", "num_shards")
# What must be given, by the name of the option.
GIVEN = {"path": str(ROOT / "README.md"), "book_path": str(ROOT / "README.md")}


def leaves(name):
    """A file as it stands in a run; whole, so that `_target_` is there."""
    if name == "sampling":
        return OmegaConf.to_container(OmegaConf.load(CONFIGS / "run.yaml"))["sampling"]
    load = lambda one: OmegaConf.load(CONFIGS / f"{one}.yaml")
    retrieves = name == "press/community"
    around = {
        "seed": 42,
        "budget": 256,
        "interval": 512,
        "scorer": None if retrieves else load("scorer/tova"),
        "allocator": load("allocator/community" if retrieves else "allocator/segment_quota"),
    }
    node = load(name)
    node.pop("defaults", None)
    for key in node:
        if OmegaConf.is_missing(node, key):
            # Else the names of a data set, of a model and of a press of kvpress.
            node[key] = GIVEN.get(key, "KnormPress" if name.startswith("press/") else "test")
    return OmegaConf.to_container(OmegaConf.create({**around, "leaf": node}), resolve=True)["leaf"]


def fits(value, annotation):
    """Whether a value is of an annotated kind; True is no whole number, and a whole number is a number."""
    for kind in get_args(annotation) if get_origin(annotation) is UnionType else (annotation,):
        kind = get_origin(kind) or kind
        if value is None:
            found = kind in (None, NoneType, object)
        elif isinstance(value, bool):
            found = kind in (bool, object)
        else:
            found = isinstance(value, kind) or (kind is float and isinstance(value, int))
        if found:
            return True
    return False


def fault(explain, made, options, key, value):
    """What is wrong with what became of a value, or None."""
    try:
        made(**{**options, key: value})
    except Exception as error:
        # As Hydra does it, which takes a hundred times as long.
        raised = InstantiationException(f"Error in call to target '{made.__module__}.{made.__qualname__}'")
        raised.__cause__ = error
        message = explain(raised, CONFIGS, [])
        if message is None:
            return f"{key}={value!r} gives a traceback: {error!r}"
        if key not in message or "\n" in message:
            return f"{key}={value!r} is refused without its name: {message}"
        return None
    annotation = inspect.signature(made).parameters[key].annotation
    return None if fits(value, annotation) else f"{key}={value!r} is accepted where {annotation} is wanted"


def faults(explain, name):
    """Of a file: how many values were tried and what is wrong; or why none could be."""
    stated = leaves(name)
    made = get_object(stated.pop("_target_"))
    options = {key: value for key, value in stated.items() if key not in OF_THE_RUN}
    try:
        options |= {
            key: instantiate(value, _convert_="all") for key, value in options.items() if isinstance(value, dict)
        }
        made(**options)
    except Exception as error:
        # An extra that is not installed; whatever else is wrong with the defaults is a fault.
        if not isinstance(error.__cause__ or error, ImportError):
            raise
        return {"skip": str(error)}
    tried = [(key, value) for key in options for value in VALUES]
    found = [fault(explain, made, options, key, value) for key, value in tried]
    return {"tried": len(tried), "faults": [text for text in found if text is not None]}


def main():
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(ROOT / "scripts"))
    from hydra_errors import explain

    models._load = lambda *_, **__: models.LoadedModel(None, None)
    models.smollm2_folder = lambda cache_dir: "somewhere"
    os.environ["HF_HUB_OFFLINE"] = "1"
    names = [f"{group}/{path.stem}" for group in GROUPS for path in sorted((CONFIGS / group).glob("*.yaml"))]
    print(json.dumps({name: faults(explain, name) for name in [*names, "sampling"]}))


if __name__ == "__main__":
    main()
