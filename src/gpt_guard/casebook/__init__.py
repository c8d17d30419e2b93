"""Ten small trainings, each with a silent bug and its fixed twin; `gpt-guard cases` runs them."""

from gpt_guard.casebook.book import Case, CaseResult, cases, run_case

__all__ = ["Case", "CaseResult", "cases", "run_case"]
