"""A benchmark's JSON as a short table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def markdown(content: Mapping[str, Any]) -> str:
    """One row per case; what was not measured is a dash."""
    device = content.get("device", {}).get("name", content.get("target", ""))
    lines = [
        f"# {device}, {content.get('date', '')[:10]}",
        "",
        (
            "| case | what | gradc us | floor us | share of the floor | eager / gradc | compile / gradc | choice (run,"
            " none, sizes open) | over the fastest | error, units |"
        ),
        "|---|---|---:|---:|---:|---:|---:|---|---|---:|",
    ]
    lines += [_row(id, row) for id, row in content["cases"].items()]
    fmad = content.get("fmad")
    if fmad:
        lines += ["", f"`--fmad=false` takes {fmad['price']:.3f} of the time of `--fmad=true` in {fmad['case']}."]
    notes = [
        f"- {id}: {note}"
        for id, row in content["cases"].items()
        for note in (
            *([f"failed: {row['failed']}"] if "failed" in row else []),
            *row.get("notes", ()),
            *row.get("skipped", ()),
        )
    ]
    if notes:
        lines += ["", "Not measured, and why:", "", *(note.replace("\n", " ")[:300] for note in notes)]
    return "\n".join(lines) + "\n"


def _row(id: str, row: Mapping[str, Any]) -> str:
    us = lambda key: f"{row[key]['median'] * 1e6:.1f}" if key in row else "-"
    ratio = lambda key: f"{row[key]:.2f}" if key in row else "-"
    floor = f"{row['floor_MB'] * 1e3 / row['copy_GB_s']:.1f}" if "copy_GB_s" in row else "-"
    share = f"{row['floor_share']:.0%}" if "floor_share" in row else "-"
    choice = ", ".join(row.get("choice", {}).values()) or "-"
    over = ", ".join(f"{v:.2f} ({row['best'][k]})" for k, v in row.get("choice_over_best", {}).items()) or "-"
    results = row.get("results", {})
    error = (
        f"{max(r['units'] for r in results.values()):.2g}"
        f"{'' if all(r['right'] for r in results.values()) else ' WRONG'}"
        if results
        else "failed"
        if "failed" in row
        else "-"
    )
    return (
        f"| {id} | {row['what']} | {us('ours')} | {floor} | {share} | {ratio('over_eager')} | {ratio('over_compiled')}"
        f" | {choice} | {over} | {error} |"
    )
