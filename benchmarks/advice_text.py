"""The five answers of docs/how-to/will-it-fit.md, each as ``lowtide advise`` printed it."""

from __future__ import annotations

SHOWN = 3  # ways that the page shows of those that fit; what is left out is said


def answer_text(name: str, lines: list[dict]) -> str:
    """The block of one question: the command and what it prints, with the first of many ways that fit."""
    (line,) = (line for line in lines if line["name"] == name)
    first, *rest = line["text"].splitlines()
    ways = next((at for at, text in enumerate(rest) if not text.startswith("  ")), len(rest))
    left_out = [f"  ({ways - SHOWN} more ways)"] if ways > SHOWN + 1 else []
    shown = rest[:SHOWN] + left_out if left_out else rest[:ways]
    return "\n".join(["```text", f"$ {line['command']}", first, *shown, *rest[ways:], "```"])


def answers_origin(lines: list[dict]) -> str:
    """Where the answers come from, in a sentence."""
    commits = ", ".join(dict.fromkeys(line["commit"] for line in lines))
    most = max(line["cpu_s"] for line in lines)
    first = lines[0]
    return (
        f"Each is what the command prints, ways beyond the first {SHOWN} left out, in {most:.0f} s of processor time "
        f"at most, imports included ({first['device']}, torch {first['torch']}, transformers "
        f"{first['transformers']}, commit {commits}). `benchmarks/advice.py` asks again."
    )
