"""Certificate of a result: the problem and search that the proof is about, sealed together with the result."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Final, Literal

from pydantic import BaseModel

from milpplan.optimize import Certification, PlanResult
from milpplan.optimize.records import Check, Verdict
from milpplan.problem import Problem
from milpplan.problem.records import Record
from milpplan.reports.blocks import Block, Items, Paragraph, Span, Table
from milpplan.reports.documents.fields import Document, digest, document_of, json_digest
from milpplan.reports.words.plan_words import cost_model_text

LIBRARIES = ("ortools", "pulp", "numpy")
"""Libraries that a proof relies on in addition to the cost model."""


class CertificateDocument(Record):
    """Subject of a result's proof.

    Digests are SHA-256: of the problem with all its constants, of the legal layouts, and (``sha256``) of the whole
    document without this field.
    """

    cost_model: str
    problem_sha256: str
    layouts_sha256: str
    forbid: tuple[dict[str, int | bool | str | tuple[int, ...]], ...] = ()
    """Layouts that the user has forbidden."""
    versions: dict[str, str] = {}
    parts: tuple[str, ...] = ()
    """Optional parts (such as ``evidence``) that this document has."""
    sha256: str = ""


class NotCertifiedDocument(Record):
    """Fields of a result that the second proof does not cover, or covers only in part, with reasons."""

    fields: tuple[str, ...]
    why: str


class CertificationDocument(Record):
    """Second proof of a result (``milpplan certify``)."""

    schema_version: Literal[1] = 1
    milpplan_version: str
    verdict: Verdict
    backend: str
    checks: tuple[Check, ...]
    claimed_gap: float | None
    objective_bound: float | None
    """Bound of the second proof, in the unit of the objective."""
    gap: float | None
    wall_time_s: float | None
    proof: str
    """Proved statement, in the certifier's words: cost model, space and tolerance. ``Nothing.`` unless the result
    is certified."""
    compared: str
    """Fields that were recomputed and compared; ``Nothing.`` unless the result is certified."""
    bounds_only: tuple[NotCertifiedDocument, ...]
    """Fields certified only as bounds: the claimed bound may be lower than the one that the run proved."""
    not_certified: tuple[NotCertifiedDocument, ...]


def certificate_of(result: PlanResult) -> CertificateDocument | None:
    """Make the unsealed certificate of a result; None where no layouts were listed, and for a robust plan, whose
    proof `milpplan certify` does not repeat."""
    if result.layouts is None or result.regret is not None:
        return None
    return certificate_for(result.problem, result.layouts.space.sha256(), result.forbid)


def certificate_for(
    problem: Problem, layouts_sha256: str, forbid: Sequence[Mapping[str, object]]
) -> CertificateDocument:
    """Make the unsealed certificate of a proof over the legal layouts with a given digest."""
    versions = {"python": platform.python_version()} | {name: version(name) for name in LIBRARIES}
    return CertificateDocument(
        cost_model=cost_model_text(problem),
        problem_sha256=digest(problem),
        layouts_sha256=layouts_sha256,
        forbid=tuple(dict(partial) for partial in forbid),
        versions=versions,
    )


def certificate_sentence(certificate: CertificateDocument) -> str:
    """Describe the subject and the tools of a proof in a sentence."""
    versions = ", ".join(f"{name} {number}" for name, number in certificate.versions.items())
    return (
        f"Certificate: cost model {certificate.cost_model}; problem with all its constants "
        f"{certificate.problem_sha256[:16]}…; legal layouts {certificate.layouts_sha256[:16]}…; {versions}."
    )


def sealed(document: Document) -> Document:
    """Seal the certificate of a document, if it has one."""
    certificate = getattr(document, "certificate", None)
    if certificate is None:
        return document
    bare = document.model_copy(update={"certificate": certificate.model_copy(update={"sha256": ""})})
    return document.model_copy(update={"certificate": certificate.model_copy(update={"sha256": digest(bare)})})


def is_sealed(document: BaseModel, text: str) -> bool:
    """Test whether the document is unchanged since its certificate was sealed.

    The digest is taken of the document's fields or, where the version that wrote it had other fields, of its
    ``text``.
    """
    certificate = getattr(document, "certificate", None)
    if certificate is None or not certificate.sha256:
        return False
    data = json.loads(text)
    bare = data | {"certificate": data["certificate"] | {"sha256": ""}}
    return sealed(document) == document or bool(json_digest(bare) == certificate.sha256)


def lacks_constants(problem: BaseModel, certificate: CertificateDocument, text: str) -> bool:
    """Test whether the proof is about the problem in ``text`` and this version has further constants.

    True for a document of a milpplan version whose cost model lacked constants that ``problem`` has.
    """
    claimed = certificate.problem_sha256
    return bool(json_digest(json.loads(text)["problem"]) == claimed != digest(problem))


def certification_document(done: Certification, claimed_gap: float | None, proof: str) -> CertificationDocument:
    """Make the document of a second proof; ``proof`` is the certifier's own sentence."""
    return document_of(
        CertificationDocument,
        done,
        done.again,
        claimed_gap=claimed_gap,
        proof=proof,
        compared=COMPARED if done.verdict == "certified" else NOTHING,
        bounds_only=tuple(NotCertifiedDocument(fields=fields, why=why) for fields, why in BOUNDS_ONLY),
        not_certified=tuple(NotCertifiedDocument(fields=fields, why=why) for fields, why in NOT_CERTIFIED),
    )


NOTHING: Final = "Nothing."
"""Statement for a result that is not certified."""

NOT_CERTIFIED: Final = (
    (
        ("wall_time_s", "target.price.wall_time_s", "margin_price.wall_time_s", "log"),
        "how long the run took and how it progressed: another run takes another time",
    ),
    (
        (
            *("solver.backend", "solver.versions", "solver.relaxations", "solver.integer_programs"),
            *("solver.witnessed", "solver.paths", "solver.simulations"),
        ),
        "which solver did how much work: another run does other work",
    ),
    (
        ("solver.tolerance",),
        "the tolerance that was asked for (--gap): a proof that depends on it names it, and that sentence is "
        "compared",
    ),
    (
        (
            *("layouts.does_not_fit", "layouts.bounded", "layouts.relaxed", "layouts.solved", "layouts.open"),
            "layouts.bounds[].fates",
        ),
        "by what each layout was decided, which depends on the run; that the counts add up to the legal layouts "
        "is checked",
    ),
)
"""Fields that only the run itself can know, with reasons. All other fields are rebuilt and compared."""

BOUNDS_ONLY: Final = (
    (
        ("lower_bound_s of the fewest GPUs", "robustness.ends[].lower_bound_s"),
        "that no plan takes less time is proved again; the run may have proved a higher bound, which no other "
        "field repeats",
    ),
)
"""Bounds that are certified from one side, with reasons: a claimed bound below the proved bound holds as well."""

COMPARED: Final = (
    "Every field of the file but those named below was computed again from the problem and the plan in it, and is "
    "the same (numbers to 1e-9)."
)

WORDS = {
    "certified": ("Certified", "green", "the result is what it says it is."),
    "refuted": ("Refuted", "bold red", "the result is not what it says it is: see the check that failed."),
    "unproved": (
        *("Not certified", "yellow"),
        "nothing speaks against the result, but the check that failed could not confirm it. A proof that was "
        "stopped needs more time.",
    ),
}


def certification_blocks(done: Certification, proof: str) -> list[Block]:
    """Show a row for each check, and the verdict with its scope in the certifier's words."""
    rows = [
        (check.name, Span("ok", "green") if check.passed else Span("FAILED", "bold red"), check.seen)
        for check in done.checks
    ]
    table = Table("", ("worked out again", "", "seen"), rows, words=(0, 1, 2))
    word, style, reason = WORDS[done.verdict]
    who = f" Second proof by {done.backend}." if done.again is not None else ""
    verdict = Paragraph(further=(Span(word, style), Span(f": {reason}{who}")))
    if done.verdict != "certified":
        return [table, verdict]
    return [
        table,
        verdict,
        Paragraph(f"Compared: {COMPARED}"),
        Paragraph(f"Proved again: {proof}"),
        Paragraph("Certified as bounds only:"),
        Items(tuple(f"{', '.join(fields)}: {why}." for fields, why in BOUNDS_ONLY)),
        Paragraph("Not certified:"),
        Items(tuple(f"{', '.join(fields)}: {why}." for fields, why in NOT_CERTIFIED)),
    ]
