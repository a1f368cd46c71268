"""Sections on what is saved: parameters, arithmetic, speed."""

import shlex
from dataclasses import dataclass

from dotmoe.report.elements import figure, joined, paragraph, table
from dotmoe.report.plots import bench_name
from dotmoe.report.result_files import ResultFiles
from dotmoe.report.sections.parts import Context, Missing, Part, Section
from dotmoe.report.words import percent

_MIB = 2**20

COUNTS = {
    "dense": "dense model",
    "stored": "stored, routers included",
    "active": "active: work on one token",
    "active_with_routers": "active, routers included",
    "active_without_embeddings": "active, without embeddings and head",
}
"""What the parameter counts of a result file are called."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arithmetic:
    """Floating-point operations of all FFNs for one token; a product and its sum are two."""

    dense: float
    experts: float
    """Of the experts that run, of shared ones and of layers that stay dense."""
    routers: float

    @property
    def moe(self) -> float:
        """Experts and routers."""
        return self.experts + self.routers

    @classmethod
    def of(cls, found: ResultFiles) -> "Arithmetic | None":
        """From the widths that the export's record states; None where there is no export.

        Three matrices of width D by neurons each; the router is D by E.
        """
        if found.export is None:
            return None
        record, split = found.export, found.results["granularity"]
        layers, width = record["num_layers"], record["model_width"]
        ffn = split["num_experts"] * split["expert_size"] + split["shared_size"]
        split_layers = layers - split["first_dense_layers"]
        run = split["active_experts"] * split["expert_size"] + split["shared_size"]
        neurons = split["first_dense_layers"] * ffn + split_layers * run
        return cls(
            dense=6 * width * ffn * layers,
            experts=6 * width * neurons,
            routers=2 * width * split["num_experts"] * split_layers,
        )


def size(context: Context) -> list[Part]:
    """Parameters and arithmetic, counted."""
    found = context.found
    counts, split = found.results["parameters"], found.results["granularity"]
    rows = [
        (name, f"{counts[key]:,}", percent(counts[key] / counts["dense"]))
        for key, name in COUNTS.items()
    ]
    shape = (
        f"{split['num_experts']} experts of {split['expert_size']} neurons a layer, "
        f"{split['active_experts']} run per token; shared neurons: {split['shared_size']}; leading "
        f"layers left dense: {split['first_dense_layers']}."
    )
    body = [
        paragraph(shape),
        table(("parameters", "number", "of dense"), rows, caption="Parameters, counted"),
    ]
    work = Arithmetic.of(found)
    if work is not None:
        parts = {
            "dense FFNs": work.dense,
            "experts that run": work.experts,
            "routers": work.routers,
            "experts and routers": work.moe,
        }
        body.append(
            table(
                ("operations", "FLOP per token", "of dense"),
                [(name, f"{n:,}", percent(n / work.dense)) for name, n in parts.items()],
                caption="FFN arithmetic for one token, counted (a product and its sum are two)",
            )
        )
    return [Section(title="Size and arithmetic", body=joined(body))]


def speed(context: Context) -> list[Part]:
    """Speed and memory, as `dotmoe bench` measured them."""
    found = context.found
    bench = found.measured.get("bench")
    if bench is None:
        words = shlex.join(["dotmoe", "bench", context.dense, context.run, "--json"])
        kept = shlex.quote(str(found.run / "6_evaluate" / "bench.json"))
        return [Missing(what="speed and memory, MoE beside dense", command=f"{words} > {kept}")]
    per = "tokens/s" if bench["settings"].get("clock", "wall") == "wall" else "tokens/CPU s"
    rows = [
        (
            bench_name(point),
            f"{point['dense']['tokens_per_s']:,.1f}",
            f"{point['moe']['tokens_per_s']:,.1f}",
            f"{point['speed_ratio']:.2f}",
            "{:.2f} to {:.2f}".format(*point["speed_ratio_quartiles"]),
            f"{point['ideal_ratio']:.2f}",
            f"{point['dense']['peak_bytes'] / _MIB:,.0f}",
            f"{point['moe']['peak_bytes'] / _MIB:,.0f}",
        )
        for point in bench["points"]
    ]
    columns = ("work", f"dense, {per}", f"MoE, {per}", "ratio", "quartiles", "ideal ratio")
    memory = ("dense, peak MiB", "MoE, peak MiB")
    body = joined(
        [
            context.plot("speed", "Speed of the MoE over that of the dense model."),
            table((*columns, *memory), rows, caption=f"Measured by {bench['runtime']}"),
            paragraph(figure(bench["protocol"]), class_="note"),
        ]
    )
    return [Section(title="Speed", body=body)]
