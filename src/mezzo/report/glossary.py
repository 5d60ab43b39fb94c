"""How to read the page: each word that carries a verdict, in a sentence or two."""

from __future__ import annotations

from collections.abc import Sequence

from mezzo.report.markup import Markup, element

_TERMS = {
    "equivalent": (
        "Three or more pairs, and the 90 % interval of the gap lies within the margin, for the loss and "
        "for the metric where there is one (paired TOST), and no single pair lies far outside. Failures in "
        "a small share of the seeds cannot be excluded: a note says how small."
    ),
    "consistent": (
        "Harm is not established, and the gap lies within the margin, or within a noise that the card "
        "names. With one or two pairs this is the best word that there is: absence of harm was not "
        "shown either."
    ),
    "inconclusive": (
        "The gap lies beyond the margin and beyond the noise and yet harm is not established, the "
        "noise is so large that the runs say nothing, or a run is not as long as FP32's."
    ),
    "divergent": (
        "Harm is established: the gap lies beyond the margin by more than chance explains. Or training "
        "broke: a loss that is not finite, weights that never moved, a quarter of what FP32 learned "
        "lost, a script that failed or ended early."
    ),
    "pair": (
        "An FP32 run and a candidate's run with the same seed. Run k adds k to every seed that the "
        "script gives; k = 0 is the script as it is. Comparing within pairs takes out the luck of the "
        "seed."
    ),
    "loss gap": (
        "The candidate's final loss minus FP32's, averaged over pairs; the final loss is the mean of "
        "the last tenth of a run's losses. Below zero the candidate did better."
    ),
    "margin": (
        "The largest harm that was declared acceptable before the runs. It is an input; the noise seen "
        "never widens it."
    ),
    "interval": (
        "Where the true value plausibly lies, given how much the runs differ: of the gap, 90 % by "
        "Student's t; of the speed, a bootstrap of the ratio of median step times. Narrow is better."
    ),
    "power": (
        "An estimate of the chance that this many pairs, this noisy, earn the word equivalent if there is "
        "no gap. It is right on average over comparisons. Low power means: add seeds."
    ),
    "one-ulp twin": (
        "An FP32 run whose initial weights were moved by one unit in the last place. How far it strays "
        "from FP32 is the noise that any change of rounding makes, harmful or not."
    ),
    "loss scale": (
        "In fp16 the loss is multiplied by this factor before backward, so that small gradients "
        "survive, and the gradients are divided by it after. An overflow skips the update and lowers "
        "the scale."
    ),
    "skipped step": (
        "An update that did not happen because a scaled gradient overflowed. A few at the start are how "
        "a dynamic scale finds its height; many, or late ones, deserve a look."
    ),
    "alarm": (
        "A skipped update whose cause is not the loss scale alone: a number that no smaller scale would have kept "
        "finite. Its row says where it was made; the places that only passed it on are in its details."
    ),
    "exponent": (
        "How often each power of two occurs among the numbers of a tensor. A format keeps those within its strip, "
        "with fewer bits where it is pale; to the left they become 0, to the right infinity."
    ),
    "lost": (
        "The share of the numbers, zeros left out, that would round to 0 or lie beyond the largest in a format. "
        "Known to the power of two: what lies between a format's largest number and the next power of two "
        "counts as kept."
    ),
    "update ratio": (
        "Magnitude of an update over that of its weight, element by element. A bf16 weight moves by every update above "
        "2⁻⁸ of it and rounds back from every one below 2⁻⁹; an fp16 one above 2⁻¹¹ and below 2⁻¹² (one under 2⁻¹⁴ "
        "loses larger ones too). Between the two it depends on the weight's digits: the shares count half of these as "
        "lost, and are off by that half at most. What is lost is lost unless an FP32 master keeps it."
    ),
    "departure": (
        "An op that ran in another format than the policy planned. The curves show what really ran; it "
        "is the plan that was not kept."
    ),
}


RUN = ("loss scale", "skipped step", "alarm", "exponent", "lost", "update ratio", "departure")
"""What a page about one run speaks of."""
WATCHED = ("alarm", "exponent", "lost", "update ratio")
"""What a page about runs that were watched speaks of besides."""
COMPARISON = tuple(term for term in _TERMS if term not in WATCHED)
"""What a page about a comparison speaks of."""


def glossary(terms: Sequence[str]) -> Markup:
    """Some terms and what they mean.

    Raises:
        KeyError: one that is not here.
    """
    return element(
        "dl",
        [element("div", element("dt", term), element("dd", _TERMS[term])) for term in terms],
        class_="glossary",
    )
