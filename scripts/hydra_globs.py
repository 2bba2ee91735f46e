"""`group=glob(folder/*)`: Hydra looks for options of a group in its own folder only, not in those below it."""

from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob

from kvstitch.evaluation.records import RunError
from kvstitch.kernels.common.spelling import did_you_mean


def expand_globs(arguments: Sequence[str], configs: Path) -> list[str]:
    """The command line with every glob over a group replaced by the options that it matches, as a sweep.

    As for files, `*` does not reach into folders: `experiment=glob(*)` is what Hydra takes it for, and
    `experiment=glob(ams_ablation/*)` the rows of that table.

    Args:
        arguments: the command line without the script's name.
        configs: folder of the configuration.

    Raises:
        RunError: nothing matches.
    """
    return [_expanded(text, configs) if "=glob(" in text.replace(" ", "") else text for text in arguments]


def _expanded(argument: str, configs: Path) -> str:
    (override,) = OverridesParser.create().parse_overrides([argument])
    pattern, folder = override.value(), configs / override.key_or_group
    if not isinstance(pattern, Glob) or not folder.is_dir():
        return argument
    names = sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))
    depths = {text.count("/") for text in pattern.include}
    chosen = pattern.filter([name for name in names if name.count("/") in depths])
    if not chosen:
        valid = sorted({f"{name.rpartition('/')[0]}/*" if "/" in name else "*" for name in names})
        near = did_you_mean(pattern.include[0], valid)
        raise RunError(
            f"{argument} matches no {override.key_or_group}; those that match some: {', '.join(valid)}{near}"
        )
    return f"{override.input_line.partition('=')[0]}={','.join(chosen)}"
