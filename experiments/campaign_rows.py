"""The rows of a campaign: what is made of each model, by which command, with which options."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dotmoe.text.config import DataConfig
from dotmoe.text.questions import asks_by_name

Options = Mapping[str, Any]
By = Literal["nothing", "convert", "finetune", "prune", "quantise", "drop_idle"]

EXPERTS_OF_CMOE = 8
"""CMoE's own granularity, with which its paper measures."""
ALIGNED_SHARE = 3_500 * 64 / (3_500 * 64 + 4_578 * 128)
"""Share of the paper's tokens that its alignment reads; its finetuning reads the others."""
IDLE_SHARE = 0.1
"""Share of the experts of a layer that a row drops as idle."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Amounts:
    """How much rows read and measures ask. The defaults are the campaign's; None: the product's."""

    calibration_tokens: int | None = None
    repair_tokens: int | None = None
    refit_tokens: int = 40_960
    """Most tokens that a refit without training reads."""
    finetune_steps: int = 240
    finetune_batch: int = 4
    finetune_seq_len: int = 512
    paper_batch: int = 8
    eval_tokens: int = 8_192
    """Tokens on which a run measures itself, besides the measures of the campaign."""
    heldout_answers: int = 24
    """Held-out own answers of each of the two kinds."""
    windows: int = 16
    """Windows of each text."""
    window: int = 2_048
    questions: int = 200
    """Questions of a task; HumanEval has 164."""

    @property
    def finetune_tokens(self) -> int:
        """Tokens that a finetuning reads."""
        return self.finetune_steps * self.finetune_batch * self.finetune_seq_len

    def fitted_tokens(self, width: int, ffn: int) -> tuple[int, int]:
        """Tokens that calibration and repair of a model of this width and FFN width read."""
        return self.calibration_tokens or 40 * width, self.repair_tokens or 40 * ffn


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A dense model of the campaign, and what is asked of it."""

    title: str
    path: str | None = None
    """Where `make` puts it, as `dotmoe convert` names it; None: it must be given."""
    shares: tuple[float, ...] = (0.75, 0.5, 0.25)
    """Shares of the FFN that are active."""
    split: Options = field(default_factory=dict)
    """Options of every conversion by our recipe and by rivals, where its defaults are not meant."""
    finetuned_tokens: tuple[int, ...] = ()
    """More amounts of text to finetune on."""
    finetuning: Options = field(default_factory=dict)
    """Options of every finetuning by our recipe, where its defaults are not meant."""
    claims: tuple[int, ...] = ()
    """Sizes of experts with which the paper's claims are checked; the first is that of all rows."""
    amounts: Amounts = field(default_factory=Amounts)
    """How much its rows read and its measures ask."""


MODELS = {
    "smollm2": Model(
        title="SmolLM2-135M-Instruct",
        path="smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        split={"expert_size": 32, "first_dense_layers": 1, "seq_len": 512},
    ),
    "gemma3_270m": Model(title="Gemma 3 270M"),
    "qwen25_coder_0.5b": Model(
        title="Qwen2.5-Coder-0.5B-Instruct",
        finetuned_tokens=(100_000, 300_000, 1_000_000),
        finetuning={"lr": 1e-5},  # the default, 9.1e-6, was chosen after the first of these
        claims=(128, 608, 64),  # 38, 8 and 76 experts: 4,864 neurons have no 29 or 58 equal parts
    ),
    "qwen25_coder_1.5b": Model(
        title="Qwen2.5-Coder-1.5B-Instruct",
        shares=(0.75, 0.5),
        # A core writes 34 tokens a second with it: fewer of them than the smaller models read.
        amounts=Amounts(calibration_tokens=16_384, refit_tokens=24_576),
    ),
    "embedded": Model(title="the embedded model", path="embedded", split={"expert_size": 16}),
}


TINY = Amounts(
    calibration_tokens=512,
    repair_tokens=512,
    finetune_steps=2,
    finetune_batch=2,
    finetune_seq_len=64,
    paper_batch=2,
    eval_tokens=256,
    heldout_answers=2,
    windows=2,
    window=64,
    questions=2,
)
"""For a trial of every row and measure in a minute or two; its numbers mean nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One model of a campaign: the dense one, or what a command makes of it."""

    name: str
    """Name of its folder."""
    what: str
    """What it is, for the table."""
    by: By
    options: Options = field(default_factory=dict)
    """Options of the command, as its function in Python takes them."""
    of: str | None = None
    """The row that it is made of; None: the dense model."""
    share: float | None = None
    """Share of the FFN that is active, where one is asked for."""
    beside: str | None = None
    """The row that it is compared with, besides the dense one."""
    by_default: bool = True
    """Whether it is made where no rows are named."""

    @property
    def given(self) -> dict[str, Any]:
        """The options that are given; the others of `options` are None."""
        return {name: value for name, value in self.options.items() if value is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What the options of all rows follow from."""

    model: Model
    amounts: Amounts
    width: int
    ffn: int
    data: tuple[str, ...]
    """Sources of the text that all rows are fitted to."""
    is_chat: bool = True
    """Whether the model answers questions, so that answers can be held out."""
    dtype: str = "auto"

    @property
    def heldout(self) -> Options:
        """Options of held-out answers; none where the model has no chat template."""
        return {"heldout_answers": self.amounts.heldout_answers} if self.is_chat else {}

    @property
    def common(self) -> Options:
        """Options of every run."""
        return {
            "eval_tokens": self.amounts.eval_tokens,
            "dtype": self.dtype,
        }

    def convert(self, share: float, **options: Any) -> Options:
        """Options of a conversion at this share."""
        fitted = {"calibration_tokens": self.amounts.calibration_tokens}
        if options.get("repair", True):
            fitted["repair_tokens"] = self.amounts.repair_tokens
        given = {name: value for name, value in fitted.items() if value is not None}
        return {**self.common, **self.text, **self.model.split, "active": share, **given, **options}

    def refit(self, share: float, **options: Any) -> Options:
        """Options of a conversion whose layers are refitted alone, on little text."""
        calibration, repair = self.amounts.fitted_tokens(self.width, self.ffn)
        tokens = min(repair, self.amounts.refit_tokens)
        own = {"repair_epochs": 0, "repair_tokens": tokens}
        if "answer_tokens" in self.text:
            own["answer_tokens"] = calibration + tokens
        return {**self.convert(share, **options), **own}

    @property
    def text(self) -> Options:
        """Options that give all conversions the same text, whatever each of them reads of it."""
        own: dict[str, Any] = {"data": self.data, **self.heldout}
        if asks_by_name(DataConfig(data=self.data)):
            own["answer_tokens"] = sum(self.amounts.fitted_tokens(self.width, self.ffn))
        return own

    def finetune(self, tokens: int | None = None, **options: Any) -> Options:
        """Options of a finetuning, on so many tokens."""
        how = self.amounts
        steps = how.finetune_steps
        if tokens is not None:
            steps = max(1, round(tokens / how.finetune_batch / how.finetune_seq_len))
        own = {
            "steps": steps,
            "batch_size": how.finetune_batch,
            "seq_len": how.finetune_seq_len,
            **self.model.finetuning,
            **self.heldout,
        }
        return {"dtype": self.dtype, **own, **options}

    @property
    def paper_steps(self) -> tuple[int, int]:
        """Steps of the paper's alignment and finetuning, of as many tokens as ours read in all."""
        how = self.amounts
        tokens = sum(how.fitted_tokens(self.width, self.ffn)) + how.finetune_tokens
        steps = tokens // (how.paper_batch * how.finetune_seq_len)
        aligned = max(1, round(ALIGNED_SHARE * steps))
        return aligned, max(1, steps - aligned)

    def align_by_paper(self, share: float, **options: Any) -> Options:
        """Options of a conversion by the paper's recipe: no shared expert, no start from data."""
        split = self.model.split
        size = {"expert_size": split["expert_size"]} if "expert_size" in split else {}
        how = self.amounts
        own = {
            "recipe": "paper",
            "data": self.data,
            **self.heldout,
            "steps": self.paper_steps[0],
            "batch_size": how.paper_batch,
            "seq_len": how.finetune_seq_len,
        }
        return {**self.common, **own, **size, "active": share, **options}


def rows_of(plan: Plan) -> list[Row]:
    """All rows of a model, each after the row that it is made of."""
    first = percent(plan.model.shares[0])
    rows = [Row(name="dense", what="dense", by="nothing")]
    for share in plan.model.shares:
        rows += _at(share, plan)
    rows.append(
        Row(
            name="sparsegpt-2-4",
            what="SparseGPT 2:4",
            by="prune",
            options={
                **plan.common,
                **plan.text,
                "method": "sparsegpt_2_4",
                "seq_len": plan.model.split.get("seq_len", plan.amounts.finetune_seq_len),
                "calibration_tokens": sum(plan.amounts.fitted_tokens(plan.width, plan.ffn)),
            },
            beside="repaired-50",
        )
    )
    for bits in (8, 4):
        rows.append(
            Row(
                name=f"gguf-q{bits}_0",
                what=f"dense, {bits} bits",
                by="quantise",
                options={"gguf_type": f"q{bits}_0"},
                of=f"frozen-{first}",
            )
        )
    rows += _of_more_text(plan)
    for share in (0.5, 0.25):
        if plan.model.claims:
            rows += _claims(share, plan)
    return rows


def _at(share: float, plan: Plan) -> Iterator[Row]:
    """The rows at one share of the FFN."""
    yield from _ours_beside_static(share, plan)
    yield from _cmoe(share, plan)
    yield from _papers(share, plan)
    yield _named(
        share,
        name="without-idle",
        what="dotmoe, repaired, a tenth of the experts dropped",
        by="drop_idle",
        options={"share": IDLE_SHARE},
        of="repaired",
        beside="repaired",
    )


def _named(share: float, *, name: str, of: str = "", beside: str = "", **more: Any) -> Row:
    """A row of a share; its name, and those of the rows that it is made of or beside, end in it."""
    at = percent(share)
    return Row(
        name=f"{name}-{at}",
        share=share,
        of=f"{of}-{at}" if of else None,
        beside=f"{beside}-{at}" if beside else None,
        **more,
    )


def _ours_beside_static(share: float, plan: Plan) -> Iterator[Row]:
    """Rows of dotmoe, and beside them static pruning with the same text, repair and finetuning."""
    yield _named(
        share,
        name="frozen",
        what="dotmoe, frozen",
        by="convert",
        options=plan.convert(share, repair=False),
    )
    for name, options, before in (
        ("refitted", plan.refit, "frozen"),
        ("repaired", plan.convert, "refitted"),
    ):
        yield _named(
            share,
            name=name,
            what=f"dotmoe, {name}",
            by="convert",
            options=options(share),
            beside=before,
        )
        yield _named(
            share,
            name=f"static-{name}",
            what=f"static pruning, {name}",
            by="convert",
            options=options(share, method="static_pruning"),
            beside=name,
        )
    yield _named(
        share,
        name="finetuned",
        what="dotmoe, finetuned",
        by="finetune",
        options=plan.finetune(),
        of="repaired",
        beside="repaired",
    )
    yield _named(
        share,
        name="static-finetuned",
        what="static pruning, finetuned",
        by="finetune",
        options=plan.finetune(),
        of="static-repaired",
        beside="finetuned",
    )


def _cmoe(share: float, plan: Plan) -> Iterator[Row]:
    """Rows of CMoE at its own granularity: as published, and with our repair."""
    cmoe = {
        "method": "cmoe",
        "active": None,
        "expert_size": None,
        "experts": EXPERTS_OF_CMOE,
        "active_experts": round(share * EXPERTS_OF_CMOE),
    }
    yield _named(
        share,
        name="cmoe",
        what="CMoE, 8 experts",
        by="convert",
        options=plan.convert(share, repair=False, **cmoe),
    )
    yield _named(
        share,
        name="cmoe-repaired",
        what="CMoE, 8 experts, repaired",
        by="convert",
        options=plan.convert(share, **cmoe),
        beside="repaired",
    )


def _papers(share: float, plan: Plan) -> Iterator[Row]:
    """Rows of the paper's own recipe, on as many tokens as ours read in all."""
    finetuned = plan.finetune(
        recipe="paper",
        steps=plan.paper_steps[1],
        batch_size=plan.amounts.paper_batch,
        lr=None,
    )
    yield _named(
        share,
        name="paper",
        what="DOT-MoE (paper), aligned",
        by="convert",
        options=plan.align_by_paper(share),
    )
    yield _named(
        share,
        name="paper-finetuned",
        what="DOT-MoE (paper), finetuned",
        by="finetune",
        options=finetuned,
        of="paper",
        beside="finetuned",
    )


def _of_more_text(plan: Plan) -> Iterator[Row]:
    """Finetunings on other amounts of text: of the repaired rows, and of the refitted ones."""
    for share in plan.model.shares:
        for tokens in plan.model.finetuned_tokens:
            yield _finetuned_on(share, tokens, plan, of="repaired", name="finetuned")
            yield _finetuned_on(share, tokens, plan, of="refitted", name="refitted-finetuned")


def _finetuned_on(share: float, tokens: int, plan: Plan, *, of: str, name: str) -> Row:
    """The finetuning of a row on so many tokens, beside that row."""
    at = percent(share)
    return Row(
        name=f"{name}-{at}-on-{tokens}",
        what=f"dotmoe, {of}, finetuned on {tokens:,} tokens",
        by="finetune",
        options=plan.finetune(tokens),
        of=f"{of}-{at}",
        share=share,
        beside=f"{of}-{at}",
        by_default=False,
    )


def _claims(share: float, plan: Plan) -> Iterator[Row]:
    """Rows for the paper's claims: start and alignment, each before and after a repair; experts.

    None has a shared expert or a leading dense layer. The alignment from a random start is the row
    `paper`, whose expert size is the first.
    """
    at, steps = percent(share), plan.paper_steps[0]
    size, *others = plan.model.claims
    plain = {"shared": 0.0, "first_dense_layers": 0, "expert_size": size}
    aligned = {**plan.align_by_paper(share), **plain, "start": "data"}

    def row(name: str, what: str, options: Options) -> Row:
        return Row(
            name=f"{name}-{at}",
            what=what,
            by="convert",
            options=options,
            share=share,
            beside=f"paper-{at}",
            by_default=False,
        )

    yield row(
        "start-random",
        "random start",
        {**plan.align_by_paper(share, steps=0), "batch_size": None, "expert_size": size},
    )
    yield row(
        "start-data",
        "start from data, nothing shared",
        plan.convert(share, **plain, repair=False),
    )
    yield row("start-data-aligned", f"the same, aligned for {steps} steps", aligned)
    yield row(
        "start-data-repaired",
        "start from data, nothing shared, repaired",
        plan.convert(share, **plain),
    )
    yield row(
        "start-data-aligned-repaired",
        f"the same, aligned for {steps} steps, repaired",
        {**aligned, "repair": True},
    )
    for other in others:
        experts = plan.ffn // other
        yield row(
            f"paper-{experts}-experts",
            f"DOT-MoE (paper), aligned, {experts} experts",
            {**plan.align_by_paper(share), "expert_size": other},
        )


def percent(share: float) -> str:
    """A share as the end of a name: `75`."""
    return f"{100 * share:.0f}"


def with_sources(rows: list[Row], names: list[str]) -> list[Row]:
    """The named rows, and those that they are made of, in the order of `rows`."""
    by_name = {row.name: row for row in rows}
    wanted = set[str]()
    for name in names:
        row: Row | None = by_name[name]
        while row is not None:
            wanted.add(row.name)
            row = by_name[row.of] if row.of else None
    return [row for row in rows if row.name in wanted]
