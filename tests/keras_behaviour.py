"""What a loss-scaling optimizer of Keras must do, as data: what Keras's public tests of its own cover, and our cases.

A row is a run of steps over one or two variables. Its gradients are written unscaled; whoever runs the row multiplies
them by the scale, as a backward pass does. What must come out is written down where it is a plain number, and for every
row it must also be what the inner optimizer makes of the good steps alone: of its variables, all of them (momentum,
averages, accumulators, the step count) and of the learning rate.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

INF, NAN = float("inf"), float("nan")

Vector = tuple[float, ...]
Gradients = tuple[Vector | None, ...]

FIRST: Vector = (1.0, 2.0, 3.0, 4.0)
GOOD: Gradients = ((1.0, 6.0, 7.0, 2.0),)
ALL_INF: Gradients = ((INF, INF, INF, INF),)
OTHER: Gradients = ((-3.0, 0.5, 0.0, 8.0),)


@dataclass(frozen=True)
class Row:
    """One run.

    Args:
        name: of the case.
        steps: the gradients of each step, one for each variable, unscaled; None where a variable has none.
        scale: S after the last.
        after: the variables after the last, where they are plain numbers.
        settings: arguments of the loss-scaling optimizer.
        inner: the inner optimizer's class in `keras.optimizers`, and its arguments; a learning rate of
            "schedule" is a schedule over two good steps.
        first: the variables to begin with.
        overwritten: of each variable whether its gradient overwrites it, and is thus not scaled.
        sparse: the gradients are given by rows: `tf.IndexedSlices`, or BCOO on JAX.
        of_keras: whether Keras's own optimizer does the same; False where that is one of its faults, or takes a setting
            that it lacks.
    """

    name: str
    steps: tuple[Gradients, ...]
    scale: float
    after: tuple[Vector, ...] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    inner: tuple[str, dict[str, Any]] = ("SGD", {"learning_rate": 0.5})
    first: tuple[Vector, ...] = (FIRST,)
    overwritten: tuple[bool, ...] = (False, False)
    sparse: bool = False
    of_keras: bool = True

    def __str__(self) -> str:
        return self.name

    @property
    def accumulates(self) -> int:
        """How many good steps make one of the inner optimizer's."""
        return int(self.inner[1].get("gradient_accumulation_steps", 1))

    def is_good(self, gradients: Gradients) -> bool:
        """Whether every number of these gradients is finite."""
        return all(abs(number) < INF for gradient in gradients if gradient is not None for number in gradient)


def sgd(**settings: Any) -> tuple[str, dict[str, Any]]:
    return ("SGD", {"learning_rate": 0.5, **settings})


def scaled(init: float = 2.0**15, every: int = 2000, **ours: Any) -> dict[str, Any]:
    """Settings of Keras's own, or of ours where it lacks them (`loss_scale` as in a policy)."""
    return ours or {"initial_scale": init, "dynamic_growth_steps": every}


BAD_ONE: Gradients = ((1.0, -INF, 7.0, 2.0),)
BAD_NAN: Gradients = ((1.0, 6.0, 7.0, NAN),)
TWO_FIRST = (FIRST, (10.0, 20.0))
MIXED = (GOOD, ALL_INF, OTHER, GOOD, BAD_NAN, BAD_ONE, OTHER)
"""Seven steps, three of them bad."""

# What Keras's public tests cover.
KERAS_S: tuple[Row, ...] = (
    Row("a good step", (GOOD,), 2.0**15, ((0.5, -1.0, -0.5, 3.0),), scaled()),
    Row(
        "a scale factor of the inner optimizer changes nothing",
        (GOOD,),
        2.0**15,
        ((0.5, -1.0, -0.5, 3.0),),
        scaled(),
        sgd(loss_scale_factor=100),
    ),
    Row("all infinite", (ALL_INF,), 2.0**14, (FIRST,), scaled()),
    Row("overwritten by its gradient", (GOOD,), 2.0**15, GOOD, scaled(), overwritten=(True, False)),  # type: ignore[arg-type]
    Row("backs off", (ALL_INF,) * 4, 25.0, (FIRST,), scaled(400.0)),
    Row("grows", (GOOD,) * 8, 32.0, ((-3.0, -22.0, -25.0, -4.0),), scaled(2.0, 2)),
    Row("counts steps", (GOOD,) * 3, 2.0**15, ((-0.5, -7.0, -7.5, 1.0),), scaled()),
    Row("by rows", (GOOD, OTHER), 2.0**15, ((2.0, -1.25, -0.5, -1.0),), scaled(), sparse=True),
)

OURS: tuple[Row, ...] = (
    Row("one infinite element", (BAD_ONE,), 2.0**14, (FIRST,), scaled()),
    Row("one NaN", (BAD_NAN,), 2.0**14, (FIRST,), scaled()),
    Row("zero gradients are good", (((0.0,) * 4,),), 2.0**15, (FIRST,), scaled()),
    Row(
        "one variable of two is bad: none moves",
        (((1.0, 6.0, 7.0, 2.0), (INF, 1.0)), ((1.0, 6.0, 7.0, 2.0), (1.0, 1.0))),
        2.0**14,
        ((0.5, -1.0, -0.5, 3.0), (9.5, 19.5)),
        scaled(),
        first=TWO_FIRST,
    ),
    Row(
        "a variable without a gradient",
        (((1.0, 6.0, 7.0, 2.0), None), (None, (INF, 1.0)), (None, (1.0, 1.0))),
        2.0**14,
        ((0.5, -1.0, -0.5, 3.0), (9.5, 19.5)),
        scaled(),
        first=TWO_FIRST,
    ),
    Row(
        "an overwritten variable beside a scaled one",
        (((1.0, 6.0, 7.0, 2.0), (0.25, 0.5)), ((INF, 6.0, 7.0, 2.0), (8.0, 8.0))),
        2.0**14,
        ((0.5, -1.0, -0.5, 3.0), (0.25, 0.5)),
        scaled(),
        first=TWO_FIRST,
        overwritten=(False, True),
    ),
    Row(
        "a growth step unscales by the scale that it had",
        (GOOD,) * 3,
        16.0,
        ((-0.5, -7.0, -7.5, 1.0),),
        scaled(2.0, 1),
    ),
    Row(
        "good steps are counted anew after an overflow",
        (GOOD, ALL_INF, GOOD, GOOD),
        2.0,
        None,
        scaled(2.0, 2),
    ),
    Row("and after growth", (GOOD,) * 5, 8.0, None, scaled(2.0, 2)),
    Row(
        "by rows, one infinite",
        (GOOD, BAD_ONE, OTHER),
        2.0**14,
        ((2.0, -1.25, -0.5, -1.0),),
        scaled(),
        sparse=True,
    ),
    # A skip leaves no trace in what the inner optimizer keeps.
    Row("momentum", MIXED, 2.0**12, None, scaled(), sgd(momentum=0.75)),
    Row("Nesterov's momentum", MIXED, 2.0**12, None, scaled(), sgd(momentum=0.75, nesterov=True)),
    Row("Adam", MIXED, 2.0**12, None, scaled(), ("Adam", {"learning_rate": 0.125})),
    Row(
        "a first step that is skipped",
        (ALL_INF, GOOD),
        2.0**14,
        None,
        scaled(),
        ("Adam", {"learning_rate": 0.125}),
    ),
    Row("weight decay", MIXED, 2.0**12, None, scaled(), sgd(weight_decay=0.25)),
    Row("an average", MIXED, 2.0**12, None, scaled(), sgd(use_ema=True, ema_momentum=0.5)),
    Row(
        "an average that overwrites",
        MIXED,
        2.0**12,
        None,
        scaled(),
        sgd(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    ),
    Row("accumulation", MIXED, 2.0**12, None, scaled(), sgd(gradient_accumulation_steps=2)),
    Row(
        "accumulation of an odd step", MIXED[:4], 2.0**14, None, scaled(), sgd(gradient_accumulation_steps=2)
    ),
    Row("a schedule", MIXED, 2.0**12, None, scaled(), ("SGD", {"learning_rate": "schedule"})),
    # Clipping sees unscaled gradients.
    Row("clipvalue", (GOOD,), 2.0**15, ((0.5, 0.0, 1.0, 3.0),), scaled(), sgd(clipvalue=4.0)),
    Row(
        "clipnorm",
        (((0.0, 3.0, 4.0, 0.0),), ALL_INF),
        2.0**14,
        ((1.0, 1.25, 2.0, 4.0),),
        scaled(),
        sgd(clipnorm=2.5),
    ),
    Row(
        "clipnorm that is not reached", (((0.0, 3.0, 4.0, 0.0),),), 2.0**15, None, scaled(), sgd(clipnorm=6.0)
    ),
    Row(
        "global_clipnorm",
        (((0.0, 3.0, 0.0, 0.0), (4.0, 0.0)),),
        2.0**15,
        ((1.0, 1.25, 3.0, 4.0), (9.0, 20.0)),
        scaled(),
        sgd(global_clipnorm=2.5),
        first=TWO_FIRST,
    ),
    # The machine beyond Keras's own.
    Row(
        "the floor",
        (ALL_INF,) * 5 + (GOOD,),
        0.5,
        ((0.5, -1.0, -0.5, 3.0),),
        scaled(loss_scale="dynamic(init=2,floor=0.5)"),
        of_keras=False,
    ),
    Row(
        "skips at the floor are counted",
        (ALL_INF,) * 5,
        0.5,
        (FIRST,),
        scaled(loss_scale="dynamic(init=2,floor=0.5)"),
        of_keras=False,
    ),
    Row(
        "the ceiling",
        (GOOD,) * 4,
        4.0,
        ((-1.0, -10.0, -11.0, 0.0),),
        scaled(loss_scale="dynamic(init=2,growth_interval=1,ceiling=4)"),
        of_keras=False,
    ),
    Row(
        "hysteresis forgives one, and skips it",
        (ALL_INF, GOOD, ALL_INF, ALL_INF),
        2.0,
        ((0.5, -1.0, -0.5, 3.0),),
        scaled(loss_scale="dynamic(init=4,hysteresis=2)"),
        of_keras=False,
    ),
    Row(
        "other factors",
        (GOOD, ALL_INF),
        1.5,
        ((0.5, -1.0, -0.5, 3.0),),
        scaled(loss_scale="dynamic(init=2,growth_factor=3,backoff_factor=0.25,growth_interval=1)"),
        of_keras=False,
    ),
    Row(
        "a scale below 1: what overflows is the unscaled gradient",
        (((2.0**127, 0.0, 0.0, 0.0),), ((8.0, 0.0, 0.0, 0.0),)),
        0.5,
        ((-(2.0**126), 2.0, 3.0, 4.0),),
        scaled(loss_scale="dynamic(init=0.5)"),
        of_keras=False,
    ),
    Row(
        "a constant",
        (GOOD, ALL_INF, GOOD),
        3.0,
        ((0.0, -4.0, -4.0, 2.0),),
        scaled(loss_scale="3"),
        of_keras=False,
    ),
    Row(
        "a constant, skips counted",
        (GOOD, ALL_INF, ALL_INF),
        8.0,
        None,
        scaled(loss_scale="8"),
        of_keras=False,
    ),
    Row("none", (GOOD, GOOD), 1.0, ((0.0, -4.0, -4.0, 2.0),), scaled(loss_scale="none"), of_keras=False),
)

ROWS = KERAS_S + OURS

# Arguments that are refused, and what the error says.
REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"dynamic": False}, "set `loss_scale_factor`"),
    ({"foo": True, "bar": 3}, "arguments: `foo`, `bar`"),
    *(
        ({name: value}, "on the `inner_optimizer`")
        for name, value in (
            ("weight_decay", 0.5),
            ("clipnorm", 0.5),
            ("global_clipnorm", 0.5),
            ("clipvalue", 0.5),
            ("use_ema", True),
            ("ema_momentum", 0.5),
            ("ema_overwrite_frequency", 2),
            ("loss_scale_factor", 0.5),
            ("gradient_accumulation_steps", 2),
        )
    ),
)
REFUSED_BY_OURS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"initial_scale": 0.0}, "init"),
    ({"initial_scale": INF}, "init"),
    ({"dynamic_growth_steps": 0}, "growth_interval"),
    ({"loss_scale": "sometimes"}, "sometimes"),
    ({"loss_scale": "statistical"}, "statistical"),
    ({"loss_scale": -1.0}, "scale"),
    ({"on_unscaled": "perhaps"}, "perhaps"),
)

# Arguments that are taken.
CONFIGS: tuple[dict[str, Any], ...] = (
    {},
    {"initial_scale": 3.0, "dynamic_growth_steps": 2},
    {"dynamic": True},
    {"loss_scale": "dynamic(init=8,floor=1,ceiling=64,hysteresis=2,patience=7,backoff_factor=0.25)"},
    {"loss_scale": 128.0, "on_unscaled": "ignore"},
    {"loss_scale": "none"},
)
# What Keras's own wrote once, and still reads: the base optimizer's arguments, at their defaults.
OLD_KEYS: dict[str, Any] = {
    "weight_decay": None,
    "clipnorm": None,
    "global_clipnorm": None,
    "clipvalue": None,
    "use_ema": False,
    "ema_momentum": 0.99,
    "ema_overwrite_frequency": None,
    "loss_scale_factor": None,
    "gradient_accumulation_steps": None,
}
