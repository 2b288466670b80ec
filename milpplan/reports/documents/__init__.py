"""JSON documents of answers, with certificates: written, read back and checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.library import lazy_exports

if TYPE_CHECKING:
    from milpplan.reports.documents.certificate import NOT_CERTIFIED, CertificationDocument, sealed
    from milpplan.reports.documents.document import (
        ResultDocument,
        SimulationDocument,
        document_text,
        layouts_document,
        proof_sentence,
        read_plan,
        read_result,
        result_document,
        simulation_document,
        tolerance_text,
    )
    from milpplan.reports.documents.fields import (
        EvidenceDocument,
        PriceDocument,
        TargetDocument,
        TermDocument,
        digest,
        evidence_document,
    )
    from milpplan.reports.documents.plan_file import PlanDocument, PlanFile, plan_document
else:
    __getattr__ = lazy_exports(__name__, __file__)
