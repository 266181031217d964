"""The pipeline's own knowledge: profiles, jobs and their values, and what became of them."""
