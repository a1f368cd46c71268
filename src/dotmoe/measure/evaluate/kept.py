"""What `--keep` chose, and what the export keeps, in words."""

from dotmoe.common.files import Values
from dotmoe.common.tables import millions, percent


def to_a_tenth(share: float) -> str:
    """A share in percent with one decimal: 90.4 %."""
    return f"{100 * share:.1f} %"


def speed_in_words(record: Values) -> str:
    """The share that was chosen, and what it costs for a token."""
    always = percent(record["shared_fraction"]) if record["shared_fraction"] else "none"
    dense_layers = record["first_dense_layers"]
    left = f", {dense_layers} leading layer left dense" if dense_layers == 1 else ""
    if dense_layers > 1:
        left = f", {dense_layers} leading layers left dense"
    return (
        f"{record['active_experts']} of {record['num_experts']} experts run "
        f"({percent(record['active_fraction'])} of the FFN, {always} of it always{left}): "
        f"{millions(record['active_parameters'])} of {millions(record['dense_parameters'])} "
        f"parameters and {percent(record['operations_share'])} of the operations of a token"
    )


def kept_in_short(record: Values) -> str:
    """What was asked, what the export keeps, and at which cost."""
    missed = "".join(
        f" Exported with {each['active_experts']} experts first, it kept "
        f"{to_a_tenth(each['kept'])}."
        for each in record["missed"]
    )
    kept = f"{100 * record['kept']:.1f}"
    error = record["kept_stderr"]
    if error is not None:
        kept += f" ± {100 * error:.1f}"
    return (
        f"Asked to keep {to_a_tenth(record['wanted'])} of the dense model's top tokens on "
        f"held-out answers, the export keeps {kept} %. {speed_in_words(record)}.{missed}"
    )
