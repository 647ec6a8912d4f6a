"""A plan as text: rich tables of what plan.json says."""

from typing import Any

from rich.console import Console
from rich.table import Table

GIB = 2**30
MEMORY = ("parameters", "optimizer", "gradients", "activations", "head", "total")


def show(plan: dict[str, Any], console: Console) -> None:
    """Print the run, the two accounts and the memory."""
    run, data = plan["run"], plan["data"]
    programs = ", ".join(f"{count} {kind}" for kind, count in run["programs"].items())
    console.print(
        f"{plan['devices']}; {data['rows']:,} rows read, {data['dropped']:,} dropped, {data['truncated']:,} truncated, "
        f"{data['tokens']:,} tokens; {run['steps']:,} steps"
    )
    console.print(
        f"this run: {programs} programs, {100 * run['padding_share']:.1f} % padding, attention blocks visited over "
        f"needed {run['visited_over_needed']:.2f}"
    )
    for table in (_settings(plan["shape_cost"]["settings"]), _break_even(plan["shape_cost"]["settings"])):
        console.print(table)
    _say_recommendation(plan, console)
    console.print(_sharing(plan["sharing"]))
    _say_sharing(plan["sharing"], console)
    console.print(_memory(plan["memory"]))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    return table


def _settings(settings: list[dict[str, Any]]) -> Table:
    marks = list(settings[0]["programs"])
    table = _table(
        f"1. shape cost: programs after {', '.join(marks)} steps, minutes for the same data (compiling and steps)",
        "shapes",
        "rows/step",
        "steps",
        *(f"programs {mark}" for mark in marks),
        "padding %",
        "visits",
        "compile min",
        *(f"min {mark}" for mark in marks),
    )
    for s in settings:
        table.add_row(
            s["name"],
            str(s["per_device_train_batch_size"]),
            f"{s['steps']:,}",
            *(f"{count:,}" for count in s["programs"].values()),
            f"{100 * s['padding_share']:.1f}",
            f"{s['visited_over_needed']:.2f}",
            f"{s['compile_minutes']['all']:.1f}",
            *(f"{minutes:.1f}" for minutes in s["minutes"].values()),
        )
    return table


def _break_even(settings: list[dict[str, Any]]) -> Table:
    names = [s["name"] for s in settings]
    table = _table("break-even: step from which on the row is ahead of the column (-: not by the end)", "", *names)
    for s in settings:
        cells = ["" if name == s["name"] else s["ahead_from_step"][name] for name in names]
        table.add_row(s["name"], *("-" if cell is None else str(cell) for cell in cells))
    return table


def _say_recommendation(plan: dict[str, Any], console: Console) -> None:
    assumed, cost = plan["assumptions"], plan["shape_cost"]
    console.print(
        f"assumed: {assumed['seconds_per_compile']:.1f} s a program ({assumed['compile_source']}), "
        f"{assumed['matmul_flops'] / 1e12:.3g} TFLOP/s ({assumed['matmul_source']}) at "
        f"{100 * assumed['efficiency']:.0f} %, so {1e3 * assumed['seconds_per_token']:.3g} ms a token"
    )
    best = cost["recommended"]
    flags = " ".join(f"--{name} {str(value).lower()}" for name, value in best["options"].items())
    console.print(f"recommended: {best['name']}{f' ({flags})' if flags else ''}: {best['reason']}")
    effort = cost["compile_effort"]
    if effort["extra_compile_minutes"] is None:
        return
    text = (
        f"compile_effort high: {effort['extra_compile_minutes']:.1f} minutes more compiling; it pays in this run if "
        f"its steps take less than {100 * effort['step_share_to_pay']:.0f} % of the time"
    )
    if effort["step_share"] is not None:
        step = effort["break_even_step"]
        text += f"; at {100 * effort['step_share']:.0f} % {'never' if step is None else f'from step {step:,} on'}"
    console.print(text)


def _sharing(sharing: dict[str, Any]) -> Table:
    table = _table(
        f"2. sharing: rows of at most {sharing['token_budget']:,} tokens",
        "samples share",
        "number",
        "raw tokens",
        "unique tokens",
        "ratio",
        "lowest",
        "median",
        "highest",
    )
    for name, level in sharing["ratio_by"].items():
        label = {"set": "over the whole set", "tree": "where it pays (by tree)"}.get(name, f"by {name}")
        ratios = (f"{level[key]:.2f}" for key in ("ratio", "lowest", "median", "highest"))
        table.add_row(label, f"{level['count']:,}", f"{level['raw_tokens']:,}", f"{level['unique_tokens']:,}", *ratios)
    return table


def _say_sharing(sharing: dict[str, Any], console: Console) -> None:
    parts = ", ".join(f"{name} {value:.2f}" for name, value in sharing["speedup_by_part"].items())
    kv, kept = sharing["kv_bytes"], sharing["activation_bytes"]
    template = f", tokenised with the {sharing['template']}" if sharing["template"] else ""
    console.print(
        f"tree rows{template}: {sharing['rows']['tree']:,} instead of {sharing['rows']['packed']:,} packed rows, "
        f"{sharing['unique_tokens']:,} tokens for {sharing['raw_tokens']:,} (packing ratio "
        f"{sharing['packing_ratio']:.2f}); counted speed-up {sharing['speedup']:.2f} ({parts}); keys and values "
        f"{kv['tree'] / GIB:.2f} instead of {kv['packed'] / GIB:.2f} GiB, layer inputs {kept['tree'] / GIB:.2f} "
        f"instead of {kept['packed'] / GIB:.2f} GiB over the set"
    )
    advice = "pay: --packing --packing_strategy tree" if sharing["tree_rows_pay"] else "do not pay on this data"
    console.print(f"tree rows {advice}")


def _memory(memory: dict[str, Any]) -> Table:
    table = _table(f"memory of a device in GiB, rows of {memory['shape'][0]:,} tokens", *MEMORY, "device", "fits")
    sizes = (f"{memory[name] / GIB:.2f}" for name in MEMORY)
    device = "not known" if memory["device"] is None else f"{memory['device'] / GIB:.2f}"
    table.add_row(*sizes, device, "yes" if memory["fits"] else "no")
    return table
