"""`python -m kvstitch.evaluation.graders.equivalence_worker`: reads pairs of LaTeX expressions, writes true or false.

One JSON list `[answer, gold]` a line; `ready` is written first. `kvstitch.evaluation.graders.equivalence` starts it.
"""

import json
import sys

# Towers of powers would otherwise take the machine's memory before the time runs out.
MEMORY_BYTES = 8 << 30


def main() -> None:
    """Serve until the input ends."""
    _limit_memory()
    from math_verify import parse, verify

    print("ready", flush=True)
    for line in sys.stdin:
        answer, gold = json.loads(line)
        # Bounded from outside: no timeouts of its own.
        sides = [parse(f"${latex}$", parsing_timeout=None) for latex in (gold, answer)]
        print(json.dumps(bool(verify(*sides, timeout_seconds=None))), flush=True)


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # not on Windows
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    soft = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


if __name__ == "__main__":
    main()
