"""From run records to statistics, tables, plots and a release. Reads JSON, never imports torch."""
