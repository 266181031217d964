"""Records to statistics, tables, plots and README; reads JSON, never imports torch."""
