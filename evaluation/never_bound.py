"""Why a budget never bound, as far as a run's figures tell, and what makes the press act."""

import re
from collections.abc import Mapping
from typing import Any


def never_bound(summary: Mapping[str, Any]) -> str:
    """What to say of a run in which nothing was evicted or left unread, by the kind of press and by what was held.

    Args:
        summary: the content of `metrics.json`.
    """
    run = summary["run"]
    start = f"THE BUDGET NEVER BOUND: no sample ever held more than {run['budget']}"
    lower = "Lower the budget or take longer samples"
    if run["num_sinks"] is None:
        return f"{start} before its questions, so nothing was evicted and the press was not tested. {lower}."
    if run["interval"] is None:
        return f"{start} at a decoded token, so everything was read and the press was not tested. {lower}."
    is_over = _held_more(summary)
    if is_over and _no_event_was_due(summary):
        return f"{_never_due(run)} {_cures(run)}"
    if is_over is False:
        return f"{start}, so nothing was evicted and the press was not tested. {lower} (task.length)."
    return (
        f"{start} when an event was due, so nothing was evicted and the press was not tested. Lower budget or interval, take "
        "longer samples, or compress the prompt, too (press.compress_prompt=true), where answers are shorter than an interval "
        f"of {run['interval']} tokens."
    )


def _never_due(run: Mapping[str, Any]) -> str:
    # In replay the prompt may be all that there is: task.prefill_tokens at or above the text.
    end = "text" if run["mode"] == "replay" else "answer"
    return (
        f"THE BUDGET NEVER BOUND: more than {run['budget']} were held, but no event was ever due, so nothing was evicted and "
        f"the press was not tested. The first event comes {run['interval']} tokens after what is prefilled, and no {end} went "
        "on for so long."
    )


def _cures(run: Mapping[str, Any]) -> str:
    if run["mode"] == "replay":
        return (
            "Prefill less (task.prefill_tokens), take longer samples (task.length), set a lower interval, or compress what is "
            "prefilled, too (press.compress_prompt=true)."
        )
    return (
        "Compress the prompt, too (press.compress_prompt=true), set a lower interval, or allow longer answers "
        "(task.max_new_tokens)."
    )


def _held_more(summary: Mapping[str, Any]) -> bool | None:
    """Whether more than the budget was held at the peak; None if the figures do not tell."""
    amount = re.match(r"(\d+) (tokens|bytes)$", str(summary["run"]["budget"]))
    if amount is None:
        # A fraction below 1 is less than what is held, whatever that is.
        return not str(summary["run"]["budget"]).startswith("1 of")
    peak = summary["metrics"].get("peak_slots" if amount[2] == "tokens" else "kept_bytes", {}).get("mean")
    return None if peak is None else peak > int(amount[1])


def _no_event_was_due(summary: Mapping[str, Any]) -> bool:
    if summary["run"]["mode"] != "replay":
        return True
    # What is compared begins after an interval.
    return summary["metrics"].get("compared_tokens", {}).get("mean") == 0
