"""`sparkgpt doctor`: what this machine can run, why not, and what to do about it."""
