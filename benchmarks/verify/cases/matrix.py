"""Runs `shardwise verify` on the cases of this folder: correct ones must not fail, planted bugs must not pass.

One case at a time, or as many as `--jobs` says; then each takes longer. Each result is a line of `--results`, so that an
interrupted run goes on where it was; `--again` drops the lines of the chosen cases first. In the end, or with `--table` alone,
all results become a markdown table.

python benchmarks/verify/cases/matrix.py --clean --bugs --write benchmarks/verify/DATE-cases.md
python benchmarks/verify/cases/matrix.py --only contrastive --again
python benchmarks/verify/cases/matrix.py --list
python benchmarks/verify/cases/matrix.py --tiny          one case, its results kept nowhere, to try the script
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from case import CASES, Case  # noqa: E402

OUTCOMES = {0: "pass", 1: "fail", 2: "could not run", 3: "not proved"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clean", action="store_true", help="the correct cases")
    parser.add_argument("--bugs", action="store_true", help="the planted bugs")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="a case by its name, or name*; may be repeated"
    )
    parser.add_argument("--family", help="the cases of one family")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time; default 1")
    parser.add_argument("--limit", type=float, default=180, metavar="SECONDS", help="for each case; default 180")
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("verify-cases.jsonl"),
        help="kept and gone on with; default ./verify-cases.jsonl",
    )
    parser.add_argument("--again", action="store_true", help="run the chosen cases anew")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="the table goes here; default: stdout")
    parser.add_argument("--table", action="store_true", help="run nothing: only write the table of the results")
    parser.add_argument("--list", action="store_true", help="run nothing: name the chosen cases")
    parser.add_argument("--tiny", action="store_true", help="one case, its results kept nowhere, to try the script")
    args = parser.parse_args()
    if args.tiny:
        with tempfile.TemporaryDirectory() as folder:
            args.only, args.results = ["loop-clean"], Path(folder) / "results.jsonl"
            compare(args)
    else:
        compare(args)


def compare(args: argparse.Namespace) -> None:
    for file in sorted([*HERE.glob("clean_*.py"), *HERE.glob("bug_*.py"), HERE / "loops.py"]):
        importlib.import_module(file.stem)
    chosen = choose(args)
    if args.list:
        for case in chosen:
            print(f"{case.name:28} {'bug' if case.bug else 'clean':6} {case.family:28} {case.what}")
        print(f"{len(chosen)} cases, {len({case.family for case in chosen})} families")
        return
    results = read(args.results)
    if args.again:
        for case in chosen:
            results.pop(case.name, None)
        args.results.write_text("".join(json.dumps(result) + "\n" for result in results.values()))
    left = [] if args.table else [case for case in chosen if case.name not in results]
    with ThreadPoolExecutor(args.jobs) as pool:
        running = {pool.submit(verify, case, args.limit): case for case in left}
        for number, finished in enumerate(as_completed(running), 1):
            case = running[finished]
            results[case.name] = result = {**finished.result(), "jobs": args.jobs}
            with args.results.open("a") as file:
                file.write(json.dumps(result) + "\n")
            right = judge(case, result)
            print(
                f"{number}/{len(left)} {case.name}: {result['outcome']} {result['cause']} {right} {result['seconds']:.0f} s",
                flush=True,
            )
    text = table([case for case in chosen if case.name in results], results)
    if args.write:
        args.write.write_text(text)
    else:
        print(text)


def choose(args: argparse.Namespace) -> list[Case]:
    def wanted(case: Case) -> bool:
        if args.only:
            return any(case.name.startswith(n[:-1]) if n.endswith("*") else case.name == n for n in args.only)
        both = args.clean == args.bugs
        return (both or case.bug == args.bugs) and (not args.family or case.family == args.family)

    names = Counter(case.name for case in CASES)
    assert max(names.values()) == 1, f"two cases of one name: {names.most_common(1)}"
    return [case for case in CASES if wanted(case)]


def read(path: Path) -> dict[str, dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    results = [json.loads(line) for line in lines if line.endswith("}")]
    return {result["name"]: result for result in results}


def verify(case: Case, limit: float) -> dict[str, Any]:
    """In a process group of its own, which ends with it: a case that hangs leaves no ranks behind."""
    with tempfile.TemporaryDirectory() as folder:
        target = str(HERE / case.target)
        if not case.is_loop:
            config = Path(folder) / f"{case.name}.yaml"
            config.write_text(case.yaml())
            target = str(config)
        command = [sys.executable, "-m", "shardwise", "verify", target, "--ranks", str(case.ranks), "--json"]
        paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OWN_WEIGHTS": folder}
        environment.pop("PYTHONHASHSEED", None)
        began = time.monotonic()
        with (Path(folder) / "out").open("w+") as out, (Path(folder) / "err").open("w+") as err:
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=out, stderr=err, text=True, start_new_session=True
            )
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            seconds = time.monotonic() - began
            out.seek(0), err.seek(0)
            report, errors = parse(out.read()), err.read()
    return {
        "name": case.name,
        "outcome": "time limit"
        if code is None
        else OUTCOMES.get(code, f"exit {code}")
        if report or code == 2
        else "crash",
        "code": code,
        "cause": first_cause(report),
        "failed": [check["name"] for check in checks(report) if check.get("verdict") == "fail"],
        "not_proved": [
            check["name"] for check in checks(report) if check.get("verdict") not in ("pass", "fail", "note")
        ],
        "said": said(report) or errors.strip()[-600:],
        "seconds": round(seconds, 1),
        "when": time.strftime("%Y-%m-%d %H:%M"),
    }


def parse(text: str) -> dict[str, Any]:
    try:
        report = json.loads(text)
    except json.JSONDecodeError:
        return {}
    return report if isinstance(report, dict) else {}


def checks(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [check for check in report.get("checks", []) if isinstance(check, dict)]


def findings(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The first one is the cause; those of the checks follow."""
    top = [report[key] for key in ("cause", "finding", "diagnosis") if report.get(key)]
    several = [one for key in ("causes", "findings") for one in report.get(key) or []]
    every = [*top, *several, *(check["finding"] for check in checks(report) if check.get("finding"))]
    return [one if isinstance(one, dict) else {"cause": str(one)} for one in every]


def first_cause(report: dict[str, Any]) -> str:
    for finding in findings(report):
        for key in ("cause", "id", "name", "kind"):
            if isinstance(finding.get(key), str):
                return str(finding[key])
    return ""


def said(report: dict[str, Any]) -> str:
    return json.dumps(findings(report)[0])[:600] if findings(report) else ""


def judge(case: Case, result: dict[str, Any]) -> str:
    """right, wrong, or what of it is: a bug may be seen and its cause be named wrongly."""
    outcome = result["outcome"]
    if not case.bug:
        return {"pass": "right", "not proved": "right, not proved", "could not run": "could not run"}.get(
            outcome, "WRONG"
        )
    if outcome == "could not run":
        return "right" if case.refusal_is_right else "WRONG"
    if outcome == "not proved":
        return "right, not proved"
    if outcome != "fail":
        return "WRONG"
    return "right" if result["cause"] in case.accepted else "seen; other cause"


def table(cases: list[Case], results: dict[str, dict[str, Any]]) -> str:
    at_a_time = max((result.get("jobs", 1) for result in results.values()), default=1)
    lines = [
        "# verify on the cases",
        "",
        f"Each case of `benchmarks/verify/cases`, {at_a_time} at a time; {os.cpu_count()} cores, "
        f"torch {importlib.metadata.version('torch')}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}. "
        "Made by `benchmarks/verify/cases/matrix.py`. Correct cases must not fail, bugs must not pass. "
        "*seen; other cause*: the bug failed, with a first cause that is not among those that the case accepts.",
    ]
    for title, bug in (("Correct", False), ("Bugs", True)):
        part = [case for case in cases if case.bug == bug]
        if not part:
            continue
        lines += [
            "",
            f"## {title}",
            "",
            "| case | family | strategy | ranks | outcome | exit | first cause | right? | s |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for case in part:
            result = results[case.name]
            code = "" if result["code"] is None else result["code"]
            settings = "".join(f", {word}" for word in extras(case))
            lines.append(
                f"| {case.name} | {case.family} | {case.strategy}{settings} | {case.ranks} | {result['outcome']} | {code} | "
                f"{result['cause'] or '; '.join(result['failed'])} | {judge(case, result)} | {result['seconds']:.0f} |"
            )
        outcomes = Counter(results[case.name]["outcome"] for case in part)
        verdicts = Counter(judge(case, results[case.name]) for case in part)
        lines += [
            "",
            f"{len(part)} cases of {len({case.family for case in part})} families: {told(outcomes)}. {told(verdicts)}.",
        ]
    odd = [case for case in cases if judge(case, results[case.name]) not in ("right", "right, not proved")]
    lines += ["", "## What was not right", ""]
    for case in odd:
        result = results[case.name]
        accepted = f" Accepted: {', '.join(case.accepted) or 'none of today'}; {case.cause}." if case.bug else ""
        saying = " ".join(result["said"].split()).replace("|", "/")[:300]
        lines.append(
            f"- **{case.name}** ({case.what}) {result['outcome']}, {result['cause'] or 'no cause'}.{accepted} Said: {saying}"
        )
    return "\n".join(lines) + "\n"


def extras(case: Case) -> list[str]:
    words = [str(case.training["precision"])] if "precision" in case.training else []
    if "gradient_accumulation" in case.training:
        words.append(f"accumulation {case.training['gradient_accumulation']}")
    return words + (["own loop"] if case.is_loop else [])


def told(counter: Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counter.most_common())


if __name__ == "__main__":
    main()
