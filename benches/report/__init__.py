"""The report: a page and its plots, out of the results' JSON files and nothing else. No figure in it is written by hand."""

from benches.report.write import ReportError, write_report

__all__ = ["ReportError", "write_report"]
