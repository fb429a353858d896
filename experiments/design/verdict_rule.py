"""The verdict rule of a spec: the deciding metric with its margin, and the requirements beside it."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from ablate.experiments.design.metrics import (
    BUDGETED_METRICS,
    CURVE_METRICS,
    EXACT_METRICS,
    LOSS_METRICS,
    METRIC_LABELS,
    METRICS,
    NOT_OURS,
    PAIRED_METRICS,
    PRIMARY_METRICS,
    PROVED_METRICS,
    REQUIRED_METRICS,
    TARGET_METRICS,
    TIMED_METRICS,
    is_declarable,
)
from ablate.experiments.design.power import SESSION_ALPHA, alpha_of
from ablate.experiments.design.problems import listed, shown
from ablate.experiments.design.spec_values import (
    NO_MARGIN,
    PERCENT,
    PERCENT_PATTERN,
    Bound,
    Difference,
    Gain,
    Margin,
    Name,
    Percent,
    SpecPart,
    Target,
    number_in,
    one_of,
    refuse,
    without_null,
)

METRIC = "tokens_per_s"
"""The deciding metric of a rule that names none."""
MAX_REQUIREMENTS = 32
MAX_KEPT = 1000
"""Most proposals of one session that can be kept."""


def _primary_schema(schema: dict[str, Any]) -> None:
    """Publish the margins that each metric allows."""
    paired = {
        "properties": {"metric": {"enum": [*PAIRED_METRICS]}, "margin": {"type": "string", "pattern": PERCENT_PATTERN}}
    }
    directed = [name for name in EXACT_METRICS if name not in LOSS_METRICS]
    percent = {"type": "string", "pattern": f"{PERCENT_PATTERN}|^{NO_MARGIN}$"}
    exact = {"required": ["metric"], "properties": {"metric": {"enum": directed}, "margin": percent}}
    alone = {"margin": {"const": NO_MARGIN}, "adopt_if": {"type": "null"}}
    identical = {"required": ["metric"], "properties": {"metric": {"enum": [*LOSS_METRICS]}, **alone}}
    not_zero = {"margin": {"not": {"const": NO_MARGIN}}}
    over_seeds = {
        "required": ["metric"],
        "properties": {"metric": {"anyOf": [{"enum": [*LOSS_METRICS]}, NOT_OURS]}, **not_zero},
    }
    at_time = {"required": ["metric"], "properties": {"metric": {"enum": _untargeted()}, **not_zero}}
    without = [{**one, "not": {"required": ["target"]}} for one in (paired, exact, identical, over_seeds, at_time)]
    to_target = {
        "required": ["metric", "target"],
        "properties": {"metric": {"enum": [*TARGET_METRICS]}, "margin": {"type": "string", "pattern": PERCENT_PATTERN}},
    }
    schema["oneOf"] = [*without, to_target]
    without_null(schema, "target")


def _untargeted() -> list[str]:
    return [name for name in CURVE_METRICS if name not in TARGET_METRICS]


def _requirement_schema(schema: dict[str, Any]) -> None:
    """Publish that a requirement has exactly one bound, and the metrics that take each."""
    without_null(schema, "max_delta", "max_value", "rule", "not_worse_by")
    schema["properties"]["rule"] = {"const": "identical", "description": schema["properties"]["rule"]["description"]}
    without_null(schema, "target")
    ours, loss = ({"properties": {"metric": {"enum": [*names]}}} for names in (BUDGETED_METRICS, LOSS_METRICS))
    free = [name for name in PROVED_METRICS if name not in TARGET_METRICS]
    none = {"not": {"required": ["target"]}}
    schema["oneOf"] = [
        {"required": ["max_delta"], **ours, **none},
        {"required": ["max_value"], **ours, **none},
        {"required": ["rule"], **loss, **none},
        {"required": ["not_worse_by"], "properties": {"metric": _ours_or_declared(free)}, **none},
        {"required": ["not_worse_by", "target"], "properties": {"metric": {"enum": [*TARGET_METRICS]}}},
    ]


def _ours_or_declared(names: Sequence[str]) -> dict[str, Any]:
    return {"anyOf": [{"enum": [*names]}, NOT_OURS]}


def primary_name(name: str, declared: Iterable[str]) -> str:
    """Return the name of a metric that can decide; reject any other."""
    allowed = (*PRIMARY_METRICS, *declared)
    return one_of(name, allowed, f"metric {shown(name)} cannot be primary; allowed", METRIC_LABELS)


def required_name(name: str, declared: Iterable[str]) -> str:
    """Return the name of a metric that can be bounded; reject any other."""
    allowed = (*REQUIRED_METRICS, *declared)
    return one_of(name, allowed, f"metric {shown(name)} cannot be required; allowed", METRIC_LABELS)


def _check_target(target: Difference | None, metric: str | None) -> None:
    """Reject a missing target, and one of a metric without a use for it."""
    if metric in TARGET_METRICS and target is None:
        raise refuse(f"'{metric}' needs a target, the loss that is to be reached", "write for example target: 3.2 nats")
    if metric is not None and metric not in TARGET_METRICS and target is not None:
        raise refuse(f"'{metric}' has no target; allowed with {listed(TARGET_METRICS)}", "leave target out")


_TARGET = "Validation loss that is to be reached, for tokens_to_loss and seconds_to_loss."


class Primary(SpecPart):
    """The deciding metric with its practical margin."""

    model_config = ConfigDict(json_schema_extra=_primary_schema)

    metric: Annotated[
        str,
        Field(
            description="The number that decides: one of ours, or one that workload.metrics declares.",
            json_schema_extra=_ours_or_declared(PRIMARY_METRICS),
        ),
    ] = METRIC
    margin: Margin = Field(
        description="Differences within this margin count as the same: a percent, or of a loss or a declared metric an "
        "amount with its unit. Metrics without noise may have 0%, where any change counts. A loss with 0% is compared "
        "bit for bit; with more it is judged by statistics over seeds."
    )
    adopt_if: Gain | None = Field(
        default=None,
        description="Improvement from which a variant is adopted, if it is proved to be beyond the margin.",
    )

    target: Target | None = Field(
        default=None, validate_default=True, exclude_if=lambda value: value is None, description=_TARGET
    )

    @field_validator("metric")
    @classmethod
    def _known(cls, value: str) -> str:
        return value if is_declarable(value) else primary_name(value, ())

    @field_validator("target")
    @classmethod
    def _of_a_curve(cls, value: Difference | None, info: ValidationInfo) -> Difference | None:
        _check_target(value, info.data.get("metric"))
        return value

    @field_validator("margin")
    @classmethod
    def _fits_the_metric(cls, value: Difference, info: Any) -> Difference:
        metric = info.data.get("metric")
        if metric and metric not in EXACT_METRICS and value.value == 0:
            raise refuse(f"the margin of '{metric}' must be above 0%: no test proves a difference of exactly zero")
        _check_unit(metric, value)
        return value

    @field_validator("adopt_if")
    @classmethod
    def _beyond_margin(cls, value: Difference | None, info: Any) -> Difference | None:
        margin, metric = info.data.get("margin"), info.data.get("metric")
        if value is None or margin is None:
            return value
        if metric in LOSS_METRICS and margin.value == 0:
            detail = f"'{metric}' with margin {NO_MARGIN} is compared bit for bit: it is the same or not"
            raise refuse(detail, "leave adopt_if out, or give a margin such as 0.01 nats")
        if value.unit != margin.unit:
            raise refuse(f"adopt_if {value} and the margin {margin} have different units", "use one unit for both")
        if value.value < margin.value:
            raise refuse(f"adopt_if {value} is below the margin {margin}", "adopt_if must be at least the margin")
        return value

    @property
    def exact(self) -> bool:
        """Whether the metric decides by its value, without statistics."""
        return self.metric in EXACT_METRICS and not self.over_seeds

    @property
    def over_seeds(self) -> bool:
        """Whether a loss, or a number of its curve, decides by statistics over seeds."""
        return self.metric in CURVE_METRICS or (self.metric in LOSS_METRICS and self.margin.value > 0)

    @property
    def timed(self) -> bool:
        """Whether a time decides."""
        return not (self.exact or self.over_seeds) or self.metric in TIMED_METRICS

    @property
    def threshold(self) -> Difference:
        """Improvement from which a variant may be adopted."""
        return self.margin if self.adopt_if is None else self.adopt_if

    @property
    def margin_pct(self) -> float:
        """The margin in percent. Raises ValueError for an amount, which `in_percent` converts."""
        return _in_percent(self.margin)

    @property
    def threshold_pct(self) -> float:
        """`threshold` in percent. Raises ValueError for an amount."""
        return _in_percent(self.threshold)

    def in_percent(self, baseline: float) -> "Primary":
        """Return the rule with amounts as percent of `baseline`, a positive mean of the metric."""
        if self.margin.relative:
            return self
        percent = {
            name: Difference(100 * amount.value / baseline, PERCENT)
            for name, amount in (("margin", self.margin), ("adopt_if", self.adopt_if))
            if amount is not None
        }
        return self.model_copy(update=percent)


def _in_percent(amount: Difference) -> float:
    if not amount.relative:
        raise ValueError(f"{amount} is no percent")
    return amount.value


def _check_unit(metric: str | None, amount: Difference) -> None:
    """Reject an amount whose unit is not the metric's. A declared metric has the unit that the spec gives it."""
    if metric is None or metric not in METRICS or amount.relative:
        return
    if METRICS[metric].kind != "loss":
        raise refuse(f"{amount} is no percent, and '{metric}' is compared in percent", "write for example 0.5%")
    if amount.unit not in ("", METRICS[metric].unit):
        raise refuse(
            f"'{metric}' is in {METRICS[metric].unit}, not in {amount.unit}", f"write 0.01 {METRICS[metric].unit}"
        )


class Requirement(SpecPart):
    """A condition on a variant besides the primary metric, with exactly one bound."""

    model_config = ConfigDict(json_schema_extra=_requirement_schema)

    metric: Annotated[
        str,
        Field(
            description="The number that is bounded: one of ours, or one that workload.metrics declares.",
            json_schema_extra=_ours_or_declared(REQUIRED_METRICS),
        ),
    ]
    max_delta: float | None = Field(
        default=None, ge=0, le=1e9, description="Allowed rise over the baseline in every block, in its unit."
    )
    max_value: float | None = Field(default=None, gt=0, le=1e9, description="Absolute budget, in the metric's unit.")
    rule: Literal["identical"] | None = Field(default=None, description="For losses: identical, bit for bit.")
    not_worse_by: Bound | None = Field(
        default=None,
        exclude_if=lambda value: value is None,
        description="For losses, speeds and declared metrics: a test must prove that the variant is worse by less, a "
        "percent or an amount.",
    )
    target: Target | None = Field(
        default=None, validate_default=True, exclude_if=lambda value: value is None, description=_TARGET
    )

    @field_validator("target")
    @classmethod
    def _of_a_curve(cls, value: Difference | None, info: ValidationInfo) -> Difference | None:
        _check_target(value, info.data.get("metric"))
        return value

    @field_validator("metric")
    @classmethod
    def _known(cls, value: str) -> str:
        return value if is_declarable(value) else required_name(value, ())

    @field_validator("max_delta", "max_value", mode="before")
    @classmethod
    def _in_its_unit(cls, value: object, info: ValidationInfo) -> object:
        metric = METRICS.get(info.data.get("metric", ""))
        return value if metric is None or value is None else number_in(metric.unit, value)

    @field_validator("not_worse_by")
    @classmethod
    def _fits_the_metric(cls, value: Difference | None, info: ValidationInfo) -> Difference | None:
        if value is not None:
            _check_unit(info.data.get("metric"), value)
        return value

    @model_validator(mode="after")
    def _exactly_one(self) -> "Requirement":
        names = ("max_delta", "max_value", "rule", "not_worse_by")
        bounds = [key for key in names if getattr(self, key) is not None]
        if len(bounds) != 1:
            raise refuse(f"give exactly one of {listed(names)}; given: {listed(bounds)}")
        declared = is_declarable(self.metric)
        if self.not_worse_by is not None:
            if not declared and self.metric not in PROVED_METRICS:
                raise refuse(
                    f"not_worse_by is for losses, speeds and declared metrics; '{self.metric}' takes max_delta"
                )
        elif not declared and self.metric not in BUDGETED_METRICS:
            raise refuse(f"'{self.metric}' differs from run to run, so a test decides", "use not_worse_by: 1%")
        elif self.rule and self.metric not in LOSS_METRICS and not declared:
            raise refuse(f"rule '{self.rule}' is for losses; '{self.metric}' takes max_delta or max_value")
        return self


class SessionLevel(SpecPart):
    """A proposal of a session, and the level from the session's budget (`ablate.experiments.design.proposals`)."""

    name: Name = Field(description="Name of the session.")
    proposal: int = Field(ge=1, le=2**53 - 1, description="Number of the proposal, from 1.")
    kept: Annotated[
        tuple[Annotated[int, Field(ge=1, le=2**53 - 1)], ...],
        Field(strict=False, max_length=MAX_KEPT, description="Kept proposals before it, from which the level follows."),
    ] = ()
    level: float = Field(gt=0, le=2 * SESSION_ALPHA, description="Two-sided level of the proposal's tests.")


def _rule_schema(schema: dict[str, Any]) -> None:
    without_null(schema, "session", "rarest_event")


class VerdictRule(SpecPart):
    """The verdict rule, hashed before the first sample."""

    model_config = ConfigDict(json_schema_extra=_rule_schema)

    primary: Primary
    require: Annotated[
        tuple[Requirement, ...],
        Field(strict=False, max_length=MAX_REQUIREMENTS, description="Further conditions for adopting a variant."),
    ] = ()
    rarest_event: Percent | None = Field(
        default=None,
        exclude_if=lambda value: value is None,
        description="Smallest share of runs at which an event of one arm alone, such as a slow mode, must not make a "
        "wrong verdict; without it, the verdict speaks of events in every run.",
    )
    session: SessionLevel | None = Field(
        default=None,
        exclude_if=lambda value: value is None,
        description="Set by the service for a proposal of a session (`ablate try`); a submitted spec must not have it.",
    )

    @property
    def timed(self) -> bool:
        """Whether times decide, or are bounded by a test: only then the noise of the machine matters."""
        return self.primary.timed or any(one.not_worse_by and one.metric in TIMED_METRICS for one in self.require)

    def level_of(self, asking: int) -> float:
        """Return the two-sided level of the `asking`-th asking of a question; in a session that of the proposal."""
        return alpha_of(asking) if self.session is None else self.session.level
